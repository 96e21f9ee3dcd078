# shellcheck shell=dash
# SRs and ISO libraries on servers of NFS and SMB, by the toolstack's daemon and `xe`. The servers run in the same
# User-mode Linux guest as their clients: this kernel has both sides of NFS, and Samba is a program. What is exported
# lies on the disk. Sourced by uml-init.sh after uml-lvm.sh, whose helpers it uses.

export_dir=/mnt/export

# load MODULE: and those that it needs, if they are modules. The host has no directory for this kernel's in /lib.
load() {
	modules=/usr/lib/uml/modules/$(uname -r)
	grep "/$1\(_generic\)\?\.ko[^:]*:" "$modules/modules.dep" | while IFS=: read -r file needs; do
		for each in $(echo "$needs" | tr ' ' '\n' | tac) "$file"; do
			busybox insmod "$modules/$each" 2>/dev/null
		done
	done
	true
}

shares_here() {
	mkdir -p /mnt/bin
	must mount --bind "$tapio_bin" /mnt/bin
	tapio_bin=/mnt/bin
	for writable in /run /tmp /var/lib/nfs /var/lib/samba /var/cache/samba /var/log /etc/samba; do
		[ -d "$writable" ] && must mount -t tmpfs tmpfs "$writable"
	done
	export HOME=/tmp
	for module in nfsd nfs nfsv3 nfsv4 fuse loop cifs md4 md5 hmac cmac ccm gcm ecb ctr seqiv ghash-generic sha512 nls_utf8; do
		load "$module"
	done
	must ip link set lo up
	must mkfs.ext4 -q -F "$disk"
	mkdir -p "$export_dir"
	must mount -t ext4 "$disk" "$export_dir"
	mkdir -p "$export_dir/sr" "$export_dir/iso" "$export_dir/smb"
	dd if=/dev/urandom of=/mnt/pattern bs=1M count=16 2>/dev/null || fail "no pattern"
}

nfs_server() {
	mkdir -p /run/rpc_pipefs /var/lib/nfs/sm /var/lib/nfs/sm.bak /var/lib/nfs/v4recovery /run/sendsigs.omit.d
	touch /var/lib/nfs/state /var/lib/nfs/etab /var/lib/nfs/rmtab
	must mount -t nfsd nfsd /proc/fs/nfsd
	must mount -t rpc_pipefs sunrpc /run/rpc_pipefs
	# A client that comes back may claim its locks for so many seconds, and new ones wait.
	echo 1 >/proc/sys/fs/nfs/nlm_grace_period
	echo 10 >/proc/fs/nfsd/nfsv4leasetime
	echo 10 >/proc/fs/nfsd/nfsv4gracetime
	must rpcbind -w
	must rpc.statd
	# The root of version 4.
	must exportfs -o rw,no_root_squash,fsid=0,insecure,no_subtree_check 127.0.0.1:"$export_dir"
	must exportfs -o rw,no_root_squash,insecure,no_subtree_check 127.0.0.1:"$export_dir/sr"
	must exportfs -o ro,insecure,no_subtree_check 127.0.0.1:"$export_dir/iso"
	must rpc.nfsd 4
	must rpc.mountd
}

# plugged VDI [mode=RO]: a block device of this system that is the VDI.
plugged() {
	host=$(ok vm-list is-control-domain=true --minimal)
	vbd=$(ok vbd-create vm-uuid="$host" vdi-uuid="$1" device=autodetect "${2:-mode=RW}")
	ok vbd-plug uuid="$vbd"
	name=$(ok vbd-param-get uuid="$vbd" param-name=device)
	node=/dev/$name
}

unplugged() {
	ok vbd-unplug uuid="$vbd"
	ok vbd-destroy uuid="$vbd"
}

# A full life of an SR on a share: type, then what a device_config has.
share_life() {
	type=$1
	shift
	sr=$(ok sr-create name-label=shared type="$type" shared=true "$@")
	pbd=$(pbd_of "$sr")
	mountpoint -q "$pool/$sr" || fail "SR $sr is not mounted"
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=data virtual-size=64MiB)
	plugged "$vdi"
	must dd if=/mnt/pattern of="$node" bs=256k oflag=direct conv=fsync
	snapshot=$(ok vdi-snapshot uuid="$vdi")
	must dd if=/dev/zero of="$node" bs=1M count=1 oflag=direct conv=notrunc,fsync
	clone=$(ok vdi-clone uuid="$snapshot")
	unplugged
	ok vdi-resize uuid="$vdi" disk-size=96MiB
	plugged "$clone"
	must cmp -n 16777216 /mnt/pattern "$node"
	unplugged
	# Detached, found by a probe, forgotten, introduced again.
	ok pbd-unplug uuid="$pbd"
	mountpoint -q "$pool/$sr" && fail "SR $sr stays mounted"
	ok sr-probe type="$type" "$@" >/mnt/probe
	same "SRs that the probe finds" "$(grep -c "^[[:space:]]*$sr\$" /mnt/probe)" 1
	ok sr-forget uuid="$sr"
	ok sr-introduce uuid="$sr" name-label=again type="$type" shared=true >/dev/null
	pbd=$(ok pbd-create sr-uuid="$sr" host-uuid="$(ok host-list --minimal)" "$@")
	ok pbd-plug uuid="$pbd"
	plugged "$vdi"
	must cmp -n 15728640 -i 1048576 /mnt/pattern "$node"
	unplugged
	refused "not empty\|NOT_EMPTY" sr-destroy uuid="$sr"
	for each in "$clone" "$snapshot" "$vdi"; do ok vdi-destroy uuid="$each"; done
	ok sr-destroy uuid="$sr"
	same "what is left on the share" "$(ls "$share_dir")" ""
}

# outage SECONDS NODE: the server is away while a writer works; answers how the writer ended, and how many blocks of
# 64 KiB it was told are written.
outage() {
	dd if=/mnt/pattern of="$2" bs=64k oflag=direct,dsync conv=notrunc 2>/mnt/.dd &
	writer=$!
	sleep 0.2
	must rpc.nfsd 0
	sleep "$1"
	must rpc.nfsd 4
	wait "$writer"
	echo "$? $(sed -n 's/+.* records out$//p' /mnt/.dd)"
}

# Whatever a writer was told is there after the server was away: all of it where the mount waits, and what came before
# the error where it gives up.
outages() {
	sr=$(ok sr-create name-label=shared type=nfs "$server" device-config:serverpath=/sr device-config:nfsversion=4.1)
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=data virtual-size=32MiB)
	plugged "$vdi"
	same "a writer whose server was away" "$(outage "${tapio_away:-5}" "$node")" "0 256"
	drop_caches
	must cmp -n 16777216 /mnt/pattern "$node"
	unplugged
	ok vdi-destroy uuid="$vdi"
	ok sr-destroy uuid="$sr"
	report "outage=$(seconds)"
	# 1 s, and once more as long: then the guest has an error, which it tells its writer.
	sr=$(ok sr-create name-label=shared type=nfs "$server" device-config:serverpath=/sr device-config:nfsversion=4.1 \
		device-config:options=soft,timeo=10,retrans=1)
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=data virtual-size=32MiB)
	plugged "$vdi"
	ended=$(outage 12 "$node")
	written=${ended#* }
	case $ended in
	0\ *) fail "a writer on a soft mount saw nothing of an outage: $ended, $(cat /mnt/.dd)" ;;
	*\ ) fail "a writer that failed does not say how much it wrote: $(cat /mnt/.dd)" ;;
	esac
	drop_caches
	must cmp -n $((written * 65536)) /mnt/pattern "$node"
	# The disk goes on.
	must dd if=/mnt/pattern of="$node" bs=256k oflag=direct conv=notrunc,fsync
	drop_caches
	must cmp -n 16777216 /mnt/pattern "$node"
	unplugged
	ok vdi-destroy uuid="$vdi"
	ok sr-destroy uuid="$sr"
	report "soft=$written"
}

nfs_stories() {
	share_dir=$export_dir/sr
	path="device-config:serverpath=$export_dir/sr"
	refused "$export_dir/iso" sr-probe type=nfs "$server"
	refused "server" sr-probe type=nfs
	refused "vers\|version" sr-create name-label=x type=nfs "$server" "$path" device-config:nfsversion=2
	refused "cannot be mounted" sr-create name-label=x type=nfs "$server" device-config:serverpath=/mnt/nothing
	ok sr-probe type=nfs "$server" "$path" device-config:probeversion=1 >/mnt/probe
	grep -q SupportedVersions /mnt/probe || fail "no versions: $(cat /mnt/probe)"
	share_life nfs "$server" "$path"
	report "nfs3=$(seconds)"
	share_life nfs "$server" device-config:serverpath=/sr device-config:nfsversion=4.1
	report "nfs41=$(seconds)"
	# Files of an export that this host's root may not write.
	refused "may not\|no_root_squash\|permission\|Read-only\|read only" sr-create name-label=x type=nfs "$server" \
		device-config:serverpath="$export_dir/iso"
}

iso_stories() {
	cp /mnt/pattern "$export_dir/iso/first.iso"
	for location in "$@"; do
		# shellcheck disable=SC2046 # One argument for each word.
		sr=$(ok sr-create name-label=library type=iso content-type=iso device-config:location="$location" $(iso_account "$location"))
		same "images of $location" "$(ok vdi-list sr-uuid="$sr" params=name-label --minimal)" first.iso
		plugged "$(ok vdi-list sr-uuid="$sr" --minimal)" mode=RO
		must cmp -n 16777216 /mnt/pattern "$node"
		unplugged
		ok pbd-unplug uuid="$(pbd_of "$sr")"
		mountpoint -q "$pool/$sr" && fail "library $location stays mounted"
		ok sr-forget uuid="$sr"
		[ -s "$export_dir/iso/first.iso" ] || fail "an image of $location is gone"
	done
}

iso_account() { case $1 in //*) echo device-config:username=root device-config:cifspassword="$password" ;; esac; }

smb_server() {
	password=geheim-4711
	cat >/etc/samba/smb.conf <<-CONF
		[global]
		server role = standalone server
		smb ports = 445
		interfaces = lo
		private dir = /run/samba/private
		lock directory = /run/samba
		state directory = /run/samba
		cache directory = /run/samba
		pid directory = /run/samba
		log file = /run/samba/log
		disable spoolss = yes
		load printers = no
		[disks]
		path = $export_dir/smb
		writeable = yes
		[iso]
		path = $export_dir/iso
	CONF
	mkdir -p /run/samba/private
	printf '%s\n%s\n' "$password" "$password" | smbpasswd -s -a root >/mnt/.out 2>&1 || fail "smbpasswd: $(cat /mnt/.out)"
	must smbd -D
	waited=0
	# Port 445 in the state "listening".
	while ! grep -q ':01BD 00000000:0000 0A' /proc/net/tcp; do
		sleep 0.1
		waited=$((waited + 1))
		[ "$waited" -lt 300 ] || fail "smbd does not listen: $(cat /run/samba/log* 2>/dev/null | tail -n 3)"
	done
}

smb_stories() {
	share_dir=$export_dir/smb
	refused "account\|mounted\|denied" sr-create name-label=x type=smb device-config:server=//127.0.0.1/disks \
		device-config:username=root device-config:password=wrong
	share_life smb device-config:server=//127.0.0.1/disks device-config:username=root \
		device-config:password="$password"
	report "smb=$(seconds)"
	grep -q "$password" /mnt/daemon.log && fail "the password is in the daemon's log"
	true
}

share_kills() {
	path="device-config:serverpath=$export_dir/sr"
	for step in sr-create:begin sr-create:directory-made sr-attach:mounted; do
		start_daemon "$step"
		dies sr-create name-label=x type=nfs device-config:server=127.0.0.1 "$path"
		start_daemon ''
		# Before it has a directory an SR is undone, later it is finished.
		sr=$(ok sr-list type=nfs --minimal)
		case $step in
		sr-create:begin) same "the SR after a kill at $step" "$sr" "" ;;
		*) mountpoint -q "$pool/$sr" || fail "the SR after a kill at $step is not plugged: '$sr'" ;;
		esac
		[ -n "$sr" ] || sr=$(ok sr-create name-label=x type=nfs device-config:server=127.0.0.1 "$path")
		grep -q "/\.share-" /proc/mounts && fail "a look is left after a kill at $step"
		stop_daemon
		start_daemon sr-erase:unmounted
		dies sr-destroy uuid="$sr"
		start_daemon ''
		same "SRs after a kill of a destroy" "$(ok sr-list type=nfs --minimal)" ""
		[ ! -e "$export_dir/sr/$sr" ] || fail "the directory of SR $sr stays"
		stop_daemon
	done
}

# What the kernel said at last, after a failure.
why() { busybox dmesg | tail -n 8 >&3; }

with_nfs() {
	shares_here
	nfs_server
	report "server=$(seconds)"
	server="device-config:server=127.0.0.1"
}

case_nfs() {
	with_nfs
	start_daemon
	nfs_stories
	iso_stories "127.0.0.1:$export_dir/iso"
	report "iso=$(seconds)"
	stop_daemon
}

case_nfs_outages() {
	with_nfs
	start_daemon
	outages
	stop_daemon
}

case_nfs_kills() {
	with_nfs
	share_kills
	report "kills=$(seconds)"
}

case_smb() {
	shares_here
	smb_server
	start_daemon
	smb_stories
	iso_stories //127.0.0.1/iso
	report "iso=$(seconds)"
	stop_daemon
}
