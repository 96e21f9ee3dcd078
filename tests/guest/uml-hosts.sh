# shellcheck shell=dash
# Two hosts on one LUN, and SRs of one VDI. Sourced by uml-init.sh after uml-resign.sh, whose helpers it uses. The LUN is
# /dev/ubda, which both guests have; what the other has done is told by files in tapio_dir.

lun=/dev/ubda

# told NAME: the first line of a file, when it is there. The bound of the test is the first to pass.
told() {
	waited=0
	while [ ! -s "$tapio_dir/$1" ]; do
		sleep 0.1
		waited=$((waited + 1))
		[ "$waited" -lt 12000 ] || fail "nothing is told of $1"
	done
	head -n 1 "$tapio_dir/$1"
}

# daemon_stands: whether a process has stopped at its step. Disk processes stop too, when a slow host is late with its lease.
daemon_stands() {
	stopped=$(grep -ls '^State:.T' /proc/[0-9]*/status)
	# shellcheck disable=SC2086 # One name a word.
	[ -n "$stopped" ] && [ -n "$(grep -Ls '^Name:.tapio-disk' $stopped)" ]
}

host_here() {
	ln -s /dev/vda /dev/vdb
	# It may lie below a directory that is about to be hidden.
	mkdir -p /mnt/told
	must mount --bind "$tapio_dir" /mnt/told
	tapio_dir=/mnt/told
	volumes_here
	[ -b "$lun" ] || fail "the guest has no LUN"
	# The same on both.
	must cp "$tapio_dir/pattern" /mnt/pattern
	start_daemon ''
	ok host-param-set uuid="$(ok host-list --minimal)" name-label="$1"
}

# Makes the SR, and is killed in the middle of a snapshot of a disk that it uses.
case_hosts_one() {
	export TAPIO_STOP_AT=lv:fork-leaf-named
	host_here one
	sr=$(ok sr-create name-label=shared type=lvm shared=true device-config:device="$lun" device-config:host-silence=20)
	same "the volumes of a new SR" "$(volume_names "$sr")" "HOSTS MGT "
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=data virtual-size=24MiB)
	plugged "$vdi"
	must dd if=/mnt/pattern of="$node" bs=1M oflag=direct conv=notrunc,fsync
	report "sr=$sr"
	report "vdi=$vdi"
	report "plugged=1"
	told snapshot >/dev/null
	xe vdi-snapshot uuid="$vdi" >/mnt/.out 2>&1 &
	waited=0
	until daemon_stands; do
		sleep 0.1
		waited=$((waited + 1))
		[ "$waited" -lt 3000 ] || fail "the snapshot does not stop: $(cat /mnt/.out)"
	done
	report "stopped=1"
	while :; do sleep 1; done
}

# Finds the SR, is refused the disk, and goes on when the other host is dead.
case_hosts_two() {
	host_here two
	sr=$(told sr)
	vdi=${sr#* }
	sr=${sr% *}
	ok sr-introduce uuid="$sr" name-label=shared type=lvm shared=true >/dev/null
	pbd=$(ok pbd-create sr-uuid="$sr" host-uuid="$(ok host-list --minimal)" device-config:device="$lun")
	ok pbd-plug uuid="$pbd"
	me=$(ok vm-list is-control-domain=true --minimal)
	vbd=$(ok vbd-create vm-uuid="$me" vdi-uuid="$vdi" device=autodetect mode=RW)
	refused "open for writing on host one" vbd-plug uuid="$vbd"
	refused "open for writing on host one" vdi-snapshot uuid="$vdi"
	ok vbd-destroy uuid="$vbd"
	own=$(ok vdi-create sr-uuid="$sr" name-label=own virtual-size=8MiB)
	report "refused=1"
	told killed >/dev/null
	# What the other left half done is finished: a base copy, the disk, and its snapshot.
	ok sr-scan uuid="$sr"
	case "$(volume_names "$sr")" in *clone_* | *NEW-*) fail "something is left: $(volume_names "$sr")" ;; esac
	same "disks of the SR" "$(ok vdi-list sr-uuid="$sr" managed=true --minimal | tr , '\n' | grep -c .)" 3
	plugged "$vdi"
	must cmp -n 16777216 /mnt/pattern "$node"
	must dd if=/dev/zero of="$node" bs=1M count=1 oflag=direct conv=notrunc,fsync
	unplugged
	for each in $(ok vdi-list sr-uuid="$sr" managed=true --minimal | tr , ' '); do
		case "$each" in "$vdi" | "$own") ;; *) reads "$each" 16777216 ;; esac
		ok vdi-destroy uuid="$each"
	done
	ok sr-destroy uuid="$sr"
	clean "$lun"
	report "survived=$(seconds)"
	stop_daemon
}

# thin_own N VDI: this host's disk is that of number N.
thin_own() {
	eval "thin_$1=$2"
	plugged "$2"
	eval "node_$1=$node vbd_$1=$vbd"
}

# thin_grows N FIRST: pieces of disk N are written until its volume has become longer; $last is the last one.
thin_grows() {
	had=$(volume_size "$sr" "VHD-$(thin_vdi "$1")")
	last=$2
	while :; do
		thin_write "$1" "$last" "$last" || fail "disk $1 is not written: $(cat "/mnt/.dd.$1")"
		[ "$(volume_size "$sr" "VHD-$(thin_vdi "$1")")" -gt "$had" ] && return
		last=$((last + 1))
		[ "$last" -lt 100 ] || fail "the volume of disk $1 has $had MiB still"
	done
}

# Makes a thin SR, and a disk for each host. Both are written at once. Then the worker stops in the middle of a growth,
# with the lock of the hosts, and the guest is killed.
case_thin_hosts_one() {
	host_here one
	sr=$(lvm_sr shared=true device-config:device="$lun" device-config:host-silence=6 \
		sm-config:allocation=thin sm-config:allocation-quantum=16MiB)
	thin_vdis "$sr" 2 2GiB
	thin_own 1 "$thin_1"
	report "sr=$sr"
	report "first=$thin_1"
	report "second=$thin_2"
	report "plugged=1"
	told go >/dev/null
	thin_write 1 0 4 || fail "the disk of the first host is not written: $(cat /mnt/.dd.1)"
	thin_holds 1 0 4
	report "written=1"
	told stop >/dev/null
	kill -9 "$daemon"
	wait "$daemon"
	export TAPIO_STOP_AT=lv:room-longer
	start_daemon ''
	thin_write 1 5 100 &
	waited=0
	until daemon_stands; do
		sleep 0.1
		waited=$((waited + 1))
		[ "$waited" -lt 1500 ] || fail "no worker stops in a growth: $(tail -n 3 /mnt/daemon.log)"
	done
	report "stopped=1"
	while :; do sleep 1; done
}

# The other host: its disk grows at the same time, and goes on when the first host is dead.
case_thin_hosts_two() {
	host_here two
	sr=$(told sr)
	ok sr-introduce uuid="$sr" name-label=shared type=lvm shared=true >/dev/null
	ok pbd-plug uuid="$(ok pbd-create sr-uuid="$sr" host-uuid="$(ok host-list --minimal)" \
		device-config:device="$lun" device-config:allocation-quantum=16MiB)"
	thin_own 2 "$(told second)"
	report "ready=1"
	told go >/dev/null
	thin_write 2 0 4 || fail "the disk of the second host is not written: $(cat /mnt/.dd.2)"
	report "written=1"
	told killed >/dev/null
	thin_grows 2 5
	report "survived=$(seconds)"
	thin_own 1 "$(told first)"
	# What the first host wrote before its end is there, and so is what the other wrote.
	drop_caches
	thin_holds_of 1 0 4
	thin_holds_of 2 0 "$last"
	thin_write 1 5 6 || fail "the disk of the dead host is not written: $(cat /mnt/.dd.1)"
	thin_holds_of 1 0 6
	thin_unplugged 2
	thin_settled "$sr" "the death of a host"
	for each in 1 2; do
		volume=$(group_of "$sr")/VHD-$(thin_vdi "$each")
		must plain lvchange -ay "$volume"
		must "$tapio_bin/tapio" vhd-util check -n "/dev/$volume"
		must plain lvchange -an "$volume"
	done
	report "holds=$(seconds)"
	stop_daemon
}

# An SR of one VDI, a copy of it that an array made, and their end.
case_single_vdi() {
	volumes_here
	start_daemon ''
	sr=$(lvm_sr device-config:device=/dev/vdb device-config:single-vdi=vhd)
	pbd=$(pbd_of "$sr")
	vdi=$(ok vdi-list sr-uuid="$sr" managed=true --minimal)
	same "the volumes" "$(volume_names "$sr")" "MGT VHD-$vdi "
	left=$(plain vgs --noheadings --units m --nosuffix -o vg_free "$(group_of "$sr")" | tr -d ' ' | cut -d. -f1)
	[ "$left" -le 4 ] || fail "$left MiB of the LUN are left"
	refused "holds one VDI" vdi-create sr-uuid="$sr" name-label=x virtual-size=4MiB
	refused "have the array copy its LUN" vdi-snapshot uuid="$vdi"
	plugged "$vdi"
	must dd if=/mnt/pattern of="$node" bs=1M oflag=direct conv=notrunc,fsync
	refused "The disk is in use" sr-destroy uuid="$sr"
	unplugged
	# The array copies the LUN.
	ok pbd-unplug uuid="$pbd"
	copy_of_original
	ok pbd-plug uuid="$pbd"
	resigned
	ok sr-probe type=lvm device-config:device=/dev/vda >/mnt/probe
	copy=$(grep -o '^[[:space:]]*[0-9a-f-]\{36\}$' /mnt/probe | tr -d '[:space:]')
	ok sr-introduce uuid="$copy" name-label=copy type=lvm >/dev/null
	copy_pbd=$(ok pbd-create sr-uuid="$copy" host-uuid="$(ok host-list --minimal)" device-config:device=/dev/vda)
	ok pbd-plug uuid="$copy_pbd"
	reads "$(ok vdi-list sr-uuid="$copy" managed=true --minimal)" 16777216
	refused "holds one VDI" vdi-create sr-uuid="$copy" name-label=x virtual-size=4MiB
	# Both go, each as one.
	ok sr-destroy uuid="$copy"
	ok sr-destroy uuid="$sr"
	clean /dev/vda /dev/vdb
	report "single=$(seconds)"
	stop_daemon
}
