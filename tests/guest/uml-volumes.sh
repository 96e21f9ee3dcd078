# shellcheck shell=dash
# SRs whose VDIs are logical volumes, by the toolstack's daemon and `xe`, on disks of a User-mode Linux guest. Sourced by
# uml-init.sh after uml-lvm.sh and uml-shares.sh, whose helpers it uses.

# The group of an SR, and the path of a volume.
group_of() { echo "VG_XenStorage-$1"; }

# volume_size SR VOLUME: in mebibytes.
volume_size() {
	plain lvs --noheadings --units m --nosuffix -o lv_size "$(group_of "$1")/$2" 2>/dev/null | tr -d ' ' | cut -d. -f1
}

# volume_names SR: all, sorted.
volume_names() { plain lvs --noheadings -o lv_name "$(group_of "$1")" 2>/dev/null | tr -d ' ' | sort | tr '\n' ' '; }

# active_of SR: how many volumes are reachable.
active_of() { plain lvs --noheadings -o lv_active "$(group_of "$1")" 2>/dev/null | grep -c active; }

# reads VDI BYTES [SKIP]: its first bytes are the pattern's, or those behind SKIP.
reads() {
	plugged "$1" mode=RO
	must cmp -n "$2" -i "${3:-0}" /mnt/pattern "$node"
	unplugged
}

volumes_here() {
	lvm_here
	for module in nbd fuse loop; do load "$module"; done
	must dd if=/dev/urandom of=/mnt/pattern bs=1M count=16
}

lvm_sr() { ok sr-create name-label=volumes type=lvm "$@"; }

# volumes_life DEVICES: an SR from its making to its end.
volumes_life() {
	devices=$1
	sr=$(lvm_sr device-config:device="$devices")
	pbd=$(pbd_of "$sr")
	same "the volumes of a new SR" "$(volume_names "$sr")" "MGT "
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=data virtual-size=64MiB)
	same "the size of its volume" "$(volume_size "$sr" "VHD-$vdi")" 72
	plugged "$vdi"
	must dd if=/mnt/pattern of="$node" bs=256k oflag=direct conv=fsync
	# Taken while it is written.
	dd if=/mnt/pattern of="$node" bs=64k seek=512 oflag=direct conv=notrunc,fsync 2>/mnt/.dd &
	writer=$!
	snapshot=$(ok vdi-snapshot uuid="$vdi")
	wait "$writer" || fail "the writer over a snapshot: $(cat /mnt/.dd)"
	base=$(ok vdi-param-get uuid="$snapshot" param-name=sm-config param-key=vhd-parent)
	same "the size of a snapshot" "$(volume_size "$sr" "VHD-$snapshot")" 8
	same "the size of its VDI" "$(volume_size "$sr" "VHD-$vdi")" 72
	[ "$(volume_size "$sr" "VHD-$base")" -le 60 ] || fail "the base copy is as long as before"
	must dd if=/dev/zero of="$node" bs=1M count=1 oflag=direct conv=notrunc,fsync
	# Larger while it is used.
	ok vdi-resize uuid="$vdi" disk-size=96MiB
	same "the size of a larger disk" "$(blockdev --getsize64 "$node")" 100663296
	must dd if=/mnt/pattern of="$node" bs=1M seek=80 oflag=direct conv=notrunc,fsync
	must cmp -n 16777216 -i 0:33554432 /mnt/pattern "$node"
	must cmp -n 16777216 -i 0:83886080 /mnt/pattern "$node"
	must cmp -n 1048576 /dev/zero "$node"
	unplugged
	clone=$(ok vdi-clone uuid="$snapshot")
	reads "$clone" 16777216
	reads "$snapshot" 16777216
	raw=$(ok vdi-create sr-uuid="$sr" name-label=raw virtual-size=16MiB sm-config:type=raw)
	plugged "$raw"
	must cmp -n 16777216 /dev/zero "$node"
	must dd if=/mnt/pattern of="$node" bs=1M oflag=direct conv=notrunc,fsync
	ok vdi-resize uuid="$raw" disk-size=20MiB
	must cmp -n 4194304 -i 0:16777216 /dev/zero "$node"
	of_raw=$(ok vdi-snapshot uuid="$raw")
	must dd if=/dev/zero of="$node" bs=1M count=2 oflag=direct conv=notrunc,fsync
	unplugged
	reads "$of_raw" 16777216
	copy=$(ok vdi-copy uuid="$of_raw" sr-uuid="$sr")
	reads "$copy" 16777216
	same "volumes that are reachable" "$(active_of "$sr")" 1
	# Detached, found by a probe, forgotten, introduced again.
	ok pbd-unplug uuid="$pbd"
	same "volumes that are reachable" "$(active_of "$sr")" 0
	refused "holds SR $sr" sr-create name-label=x type=lvm device-config:device="${devices%,*}"
	ok sr-probe type=lvm device-config:device="$devices" >/mnt/probe
	same "SRs that the probe finds" "$(grep -c "^[[:space:]]*$sr\$" /mnt/probe)" 1
	ok sr-forget uuid="$sr"
	ok sr-introduce uuid="$sr" name-label=again type=lvm >/dev/null
	pbd=$(ok pbd-create sr-uuid="$sr" host-uuid="$(ok host-list --minimal)" device-config:device="$devices")
	ok pbd-plug uuid="$pbd"
	same "the name of the VDI" "$(ok vdi-param-get uuid="$vdi" param-name=name-label)" data
	reads "$vdi" 15728640 1048576
	# One image of the chain is enough when the snapshot and the clone are gone.
	refused "not empty\|NOT_EMPTY" sr-destroy uuid="$sr"
	ok vdi-destroy uuid="$clone"
	plugged "$vdi"
	ok vdi-destroy uuid="$snapshot"
	collected "$sr" "VHD-$base"
	must cmp -n 15728640 -i 1048576 /mnt/pattern "$node"
	must cmp -n 16777216 -i 0:83886080 /mnt/pattern "$node"
	must cmp -n 1048576 /dev/zero "$node"
	unplugged
	for each in "$of_raw" "$raw" "$copy" "$vdi"; do ok vdi-destroy uuid="$each"; done
	same "the volumes in the end" "$(volume_names "$sr")" "MGT "
	ok sr-destroy uuid="$sr"
	# shellcheck disable=SC2046 # One argument for each word.
	clean $(echo "$devices" | tr , ' ')
}

# collected SR VOLUME: the collection of the SR comes to an end, and the volume is gone.
collected() {
	waited=0
	while plain lvs "$(group_of "$1")/$2" >/dev/null 2>&1; do
		ok sr-gc uuid="$1" >/mnt/.gc
		sleep 0.1
		waited=$((waited + 1))
		[ "$waited" -lt 300 ] || fail "$2 is not merged: $(tr '\n' ' ' </mnt/.gc) / $(tail -n 3 /mnt/daemon.log)"
	done
}

# sector TEXT: with blanks behind.
sector() { printf '%-512.512s' "$1"; }

# An SR in XenServer's layout, made by LVM's programs and qemu-img, is taken in; what is made here is read by them.
volumes_by_hand() {
	sr=$(cat /proc/sys/kernel/random/uuid)
	vdi=$(cat /proc/sys/kernel/random/uuid)
	raw=$(cat /proc/sys/kernel/random/uuid)
	group=$(group_of "$sr")
	must plain pvcreate -ff -y --metadatasize 10M /dev/vda
	must plain vgcreate "$group" /dev/vda
	must plain lvcreate -y -n MGT -L 4M "$group"
	{
		sector "XSSM:4096      :1:2"
		sector "<?xml version=\"1.0\" ?><uuid>$sr</uuid><allocation>thick</allocation>"
		sector "<name_label>theirs</name_label>"
		sector "<name_description></name_description>"
		sector "<vdi><name_label>by &lt;hand&gt;</name_label><name_description></name_description>"
		sector "<uuid>$vdi</uuid><is_a_snapshot>0</is_a_snapshot><snapshot_of></snapshot_of><vdi_type>vhd</vdi_type>\
<type>user</type><read_only>0</read_only><managed>1</managed><deleted>0</deleted></vdi>"
		sector "<vdi><name_label>before</name_label><name_description>by hand</name_description>"
		sector "<uuid>$raw</uuid><is_a_snapshot>1</is_a_snapshot><snapshot_of>$vdi</snapshot_of>\
<snapshot_time>20240131T12:00:00Z</snapshot_time><vdi_type>aio</vdi_type>\
<type>user</type><read_only>0</read_only><managed>1</managed><deleted>0</deleted></vdi>"
	} | dd of="/dev/$group/MGT" conv=notrunc,fsync 2>/mnt/.dd || fail "the metadata: $(cat /mnt/.dd)"
	must plain lvcreate -y -n "LV-$raw" -L 16M "$group"
	must dd if=/mnt/pattern of="/dev/$group/LV-$raw" bs=1M conv=notrunc,fsync
	must qemu-img convert -f raw -O vpc -o subformat=dynamic,force_size=on /mnt/pattern /mnt/theirs.vhd
	must plain lvcreate -y -n "VHD-$vdi" -L 24M "$group"
	must dd if=/mnt/theirs.vhd of="/dev/$group/VHD-$vdi" bs=1M conv=notrunc,fsync
	tail -c 512 /mnt/theirs.vhd | dd of="/dev/$group/VHD-$vdi" bs=512 seek=$((24 * 2048 - 1)) conv=notrunc,fsync 2>/mnt/.dd
	rm /mnt/theirs.vhd
	must plain vgchange -an "$group"
	ok sr-probe type=lvm device-config:device=/dev/vda >/mnt/probe
	grep -q "$sr" /mnt/probe || fail "the probe does not find $sr: $(cat /mnt/probe)"
	ok sr-introduce uuid="$sr" name-label=theirs type=lvm >/dev/null
	pbd=$(ok pbd-create sr-uuid="$sr" host-uuid="$(ok host-list --minimal)" device-config:device=/dev/vda)
	ok pbd-plug uuid="$pbd"
	same "the name of their VDI" "$(ok vdi-param-get uuid="$vdi" param-name=name-label)" "by <hand>"
	same "the description of their snapshot" "$(ok vdi-param-get uuid="$raw" param-name=name-description)" "by hand"
	same "whether it is one" "$(ok vdi-param-get uuid="$raw" param-name=is-a-snapshot)" true
	same "what it is of" "$(ok vdi-param-get uuid="$raw" param-name=snapshot-of)" "$vdi"
	same "when it was taken" "$(ok vdi-param-get uuid="$raw" param-name=snapshot-time)" 20240131T12:00:00Z
	reads "$vdi" 16777216
	reads "$raw" 16777216
	snapshot=$(ok vdi-snapshot uuid="$vdi")
	plugged "$vdi"
	must dd if=/dev/zero of="$node" bs=1M count=1 oflag=direct conv=notrunc,fsync
	unplugged
	reads "$snapshot" 16777216
	reads "$vdi" 15728640 1048576
	ours=$(ok vdi-create sr-uuid="$sr" name-label=mine virtual-size=16MiB)
	ok vdi-param-set uuid="$ours" name-label=ours
	plugged "$ours"
	must dd if=/mnt/pattern of="$node" bs=1M oflag=direct conv=notrunc,fsync
	unplugged
	ok pbd-unplug uuid="$pbd"
	must plain vgchange -ay "$group"
	must qemu-img compare -f vpc -F raw "/dev/$group/VHD-$ours" /mnt/pattern
	must "$tapio_bin/tapio" vhd-util check -n "/dev/$group/VHD-$ours"
	must "$tapio_bin/tapio" vhd-util check -n "/dev/$group/VHD-$vdi"
	grep -aq "<name_label>ours</name_label>" "/dev/$group/MGT" || fail "the metadata do not name our VDI"
	grep -aq "<uuid>$snapshot</uuid><is_a_snapshot>1</is_a_snapshot><snapshot_of>$vdi</snapshot_of>" "/dev/$group/MGT" ||
		fail "the metadata do not say what our snapshot is of"
	must plain vgchange -an "$group"
	ok pbd-plug uuid="$pbd"
	for each in "$snapshot" "$vdi" "$raw" "$ours"; do ok vdi-destroy uuid="$each"; done
	same "the volumes in the end" "$(volume_names "$sr")" "MGT "
	ok sr-destroy uuid="$sr"
	clean /dev/vda
}

# On sectors of 4096 bytes, and on a device that becomes longer.
volumes_on_large_sectors() {
	truncate -s 160M /mnt/large
	large=$(losetup -f --show -b 4096 /mnt/large) || fail "no loop device with sectors of 4096 bytes"
	sr=$(lvm_sr device-config:device="$large")
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=data virtual-size=24MiB)
	plugged "$vdi"
	must dd if=/mnt/pattern of="$node" bs=64k oflag=direct conv=fsync
	snapshot=$(ok vdi-snapshot uuid="$vdi")
	must dd if=/dev/zero of="$node" bs=64k count=16 oflag=direct conv=notrunc,fsync
	unplugged
	reads "$snapshot" 16777216
	reads "$vdi" 15728640 1048576
	before=$(ok sr-param-get uuid="$sr" param-name=physical-size)
	truncate -s 200M /mnt/large
	must losetup -c "$large"
	ok sr-scan uuid="$sr"
	ok sr-update uuid="$sr"
	after=$(ok sr-param-get uuid="$sr" param-name=physical-size)
	[ "$after" -gt "$before" ] || fail "the SR has not become larger: $before, $after"
	ok vdi-destroy uuid="$snapshot"
	ok vdi-destroy uuid="$vdi"
	ok sr-destroy uuid="$sr"
	must losetup -d "$large"
	rm /mnt/large
}

case_volumes() {
	volumes_here
	start_daemon
	volumes_life /dev/vda,/dev/vdb
	report "life=$(seconds)"
	stop_daemon
}

case_volumes_others() {
	volumes_here
	start_daemon
	volumes_by_hand
	report "hand=$(seconds)"
	volumes_on_large_sectors
	report "sectors=$(seconds)"
	stop_daemon
}

# is_settled SR: once the SR is attached, every volume is an image, or the metadata.
is_settled() {
	waited=0
	while [ "$(ok pbd-param-get uuid="$(pbd_of "$1")" param-name=currently-attached)" != true ]; do
		sleep 0.1
		waited=$((waited + 1))
		[ "$waited" -lt 900 ] || fail "SR $1 is not attached again: $(tail -n 3 /mnt/daemon.log | tr '\n' ' ')"
	done
	odd=$(volume_names "$1" | tr ' ' '\n' | grep -v '^MGT$' | grep -v '^VHD-[0-9a-f-]*$' | grep -v '^LV-[0-9a-f-]*$')
	same "volumes that a kill left" "$(echo "$odd" | tr '\n' ' ' | tr -d ' ')" ""
}

# broken SR STEPS COMMAND...: the storage worker dies at each of the steps of a command, the last one first, so that what
# puts one in order does not come past the next. The daemon that runs dies at the first of them, and one without is left.
broken() {
	sr=$1
	steps=$2
	shift 2
	stop_daemon
	for step in $steps; do
		start_daemon "lv:$step"
		is_settled "$sr"
		size=$((size + 8))
		[ -z "$writes" ] || written "$writes"
		dies "$@" ${grows:+"disk-size=${size}MiB"}
	done
	start_daemon ''
	is_settled "$sr"
}

# written VDI: a sector of it is written, so that it holds something of its own. What it holds stays the same.
written() {
	plugged "$1"
	must dd if=/mnt/pattern of="$node" bs=4096 count=1 oflag=direct conv=notrunc,fsync
	unplugged
}

# What a kill leaves of each change is finished or undone, and no disk loses a byte.
case_volumes_kills() {
	volumes_here
	start_daemon
	sr=$(lvm_sr device-config:device=/dev/vda)
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=data virtual-size=24MiB)
	plugged "$vdi"
	must dd if=/mnt/pattern of="$node" bs=1M oflag=direct conv=fsync
	unplugged
	broken "$sr" "create-filled" \
		vdi-create sr-uuid="$sr" name-label=new virtual-size=8MiB
	report "create=$(seconds)"
	size=24 grows=yes
	broken "$sr" "inflate-longer" \
		vdi-resize uuid="$vdi"
	grows=
	report "resize=$(seconds)"
	writes=$vdi
	broken "$sr" "fork-hidden fork-leaf-named fork-base-named" vdi-snapshot uuid="$vdi"
	writes=
	report "fork=$(seconds)"
	reads "$vdi" 16777216
	report "data=$(seconds)"
	stop_daemon
}
