# shellcheck shell=dash
# Two hosts on one export of a real NFS server: each has a network, a name, mounts and directories of its own in this
# guest, and so is a client of its own to the server, which has the first network. Sourced by uml-init.sh after
# uml-shares.sh, whose helpers it uses.

# nfs_client NAME NUMBER: a network that reaches the server by 10.9.NUMBER.1.
nfs_client() {
	must ip netns add "$1"
	must ip link add "$1" type veth peer name eth0 netns "$1"
	must ip addr add "10.9.$2.1/24" dev "$1"
	must ip link set "$1" up
	must ip -n "$1" addr add "10.9.$2.2/24" dev eth0
	must ip -n "$1" link set eth0 up
	must ip -n "$1" link set lo up
	must exportfs -o rw,no_root_squash,fsid=0,insecure,no_subtree_check "10.9.$2.2:$export_dir"
	must exportfs -o rw,no_root_squash,insecure,no_subtree_check "10.9.$2.2:$export_dir/sr"
}

# nfs_host NAME [STEP]: the daemon of a host, whose storage workers stop at STEP.
nfs_host() {
	mkdir -p "/mnt/shm-$1"
	# shellcheck disable=SC2016 # For the inner shell.
	TAPIO_SHM_DIR=/mnt/shm-$1 TAPIO_STOP_AT=$2 ip netns exec "$1" \
		unshare --uts sh -c 'hostname "$0" && exec "$@"' "$1" "$tapio_bin/tapiod" --config /dev/null \
		--run-dir "/run/$1" --state-dir "/mnt/state-$1" --mount-dir "/mnt/m-$1" --no-tls --http none \
		>>/mnt/daemon.log 2>&1 &
	waited=0
	while [ ! -s "/run/$1/listening" ]; do
		sleep 0.05
		waited=$((waited + 1))
		[ "$waited" -lt 600 ] || fail "the daemon of $1 does not come up: $(tail -n 5 /mnt/daemon.log | tr '\n' ' ')"
	done
	on_host=$1
	ok host-param-set uuid="$(ok host-list --minimal)" name-label="$1"
}

# A host sees what the other does, has no disk that the other writes, and goes on when it dies in a snapshot.
case_nfs_hosts() {
	shares_here
	load veth
	nfs_server
	# No client of before comes back.
	echo Y >/proc/fs/nfsd/v4_end_grace
	nfs_client one 1
	nfs_client two 2
	nfs_host one fork:swapped
	sr=$(ok sr-create name-label=shared type=nfs shared=true device-config:server=10.9.1.1 \
		device-config:serverpath=/sr device-config:nfsversion=4.1 device-config:host-silence=15)
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=data virtual-size=24MiB)
	still=$(ok vdi-create sr-uuid="$sr" name-label=still virtual-size=24MiB)
	plugged "$still"
	must dd if=/mnt/pattern of="$node" bs=1M oflag=direct conv=notrunc,fsync
	unplugged
	plugged "$vdi"
	must dd if=/mnt/pattern of="$node" bs=1M oflag=direct conv=notrunc,fsync
	nfs_host two
	ok sr-introduce uuid="$sr" name-label=shared type=nfs shared=true >/dev/null
	ok pbd-plug uuid="$(ok pbd-create sr-uuid="$sr" host-uuid="$(ok host-list --minimal)" device-config:server=10.9.2.1 \
		device-config:serverpath=/sr device-config:nfsversion=4.1)"
	same "clients of the server" "$(find /proc/fs/nfsd/clients -mindepth 1 -maxdepth 1 | wc -l)" 2
	host=$(ok vm-list is-control-domain=true --minimal)
	vbd=$(ok vbd-create vm-uuid="$host" vdi-uuid="$vdi" device=autodetect mode=RW)
	refused "open for writing on host one" vbd-plug uuid="$vbd"
	refused "open for writing on host one" vdi-snapshot uuid="$vdi"
	ok vbd-destroy uuid="$vbd"
	# What this one makes, the other sees.
	snapshot=$(ok vdi-snapshot uuid="$still")
	reads "$snapshot" 16777216
	on_host=one
	ok sr-scan uuid="$sr"
	same "what a snapshot is of, on the other host" \
		"$(ok vdi-param-get uuid="$snapshot" param-name=sm-config param-key=vhd-parent)" \
		"$(ok vdi-param-get uuid="$still" param-name=sm-config param-key=vhd-parent)"
	report "shared=$(seconds)"
	# It hangs in the middle of a snapshot of a disk that it uses, and dies.
	xe vdi-snapshot uuid="$vdi" >/mnt/.out 2>&1 &
	waited=0
	until daemon_stands; do
		sleep 0.1
		waited=$((waited + 1))
		[ "$waited" -lt 600 ] || fail "the snapshot does not stop: $(cat /mnt/.out)"
	done
	# shellcheck disable=SC2046 # One argument for each process.
	kill -9 $(ip netns pids one)
	on_host=two
	ok sr-scan uuid="$sr"
	same "disks of the SR" "$(ok vdi-list sr-uuid="$sr" managed=true --minimal | tr , '\n' | grep -c .)" 4
	plugged "$vdi"
	must cmp -n 16777216 /mnt/pattern "$node"
	must dd if=/dev/zero of="$node" bs=1M count=1 oflag=direct conv=notrunc,fsync
	unplugged
	for each in $(ok vdi-list sr-uuid="$sr" managed=true --minimal | tr , ' '); do
		[ "$each" = "$vdi" ] || reads "$each" 16777216
		ok vdi-destroy uuid="$each"
	done
	ok sr-destroy uuid="$sr"
	same "what is left on the share" "$(find "$export_dir/sr" -mindepth 1)" ""
	report "survived=$(seconds)"
	# shellcheck disable=SC2046 # One argument for each process.
	kill $(ip netns pids two)
}
