# shellcheck shell=dash
# Copies of an SR of logical volumes that get UUIDs of their own, on two disks of a User-mode Linux guest: the second one
# has the SR, and what an array does with a LUN is done by copying it to the first. Sourced by uml-init.sh after
# uml-volumes.sh, whose helpers it uses.

# The SR that an array copied, detached from this host or not: a chain of a raw and of two VHD images, and names.
resign_original() {
	sr=$(lvm_sr device-config:device=/dev/vdb)
	pbd=$(pbd_of "$sr")
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=data virtual-size=24MiB)
	plugged "$vdi"
	must dd if=/mnt/pattern of="$node" bs=1M oflag=direct conv=notrunc,fsync
	snapshot=$(ok vdi-snapshot uuid="$vdi")
	must dd if=/dev/zero of="$node" bs=1M count=1 oflag=direct conv=notrunc,fsync
	unplugged
	raw=$(ok vdi-create sr-uuid="$sr" name-label=raw virtual-size=16MiB sm-config:type=raw)
	plugged "$raw"
	must dd if=/mnt/pattern of="$node" bs=1M oflag=direct conv=notrunc,fsync
	of_raw=$(ok vdi-snapshot uuid="$raw")
	must dd if=/dev/zero of="$node" bs=1M count=2 oflag=direct conv=notrunc,fsync
	unplugged
}

# What the array does.
copy_of_original() { must dd if=/dev/vdb of=/dev/vda bs=1M conv=fsync; }

original() { dd if=/dev/vdb bs=1M iflag=direct 2>/dev/null | sha256sum; }

resigned() {
	before=$(original)
	refused "The SR has been successfully resigned. Use the lvm type to attach it" \
		sr-create name-label=copy type=relvm device-config:device=/dev/vda
}

# ids DEVICE: all of LVM's UUIDs on it.
ids() {
	for table in "pvs -o pv_uuid" "vgs -o vg_uuid" "lvs -o lv_uuid"; do
		# shellcheck disable=SC2086 # A program and its arguments.
		plain $table --noheadings --devices "$1" 2>/dev/null
	done | tr -d ' ' | sort
}

# The copy is found, introduced and attached beside the original, and both have all their data.
side_by_side() {
	same "UUIDs that copy and original share" "$(ids /dev/vda >/mnt/.a; ids /dev/vdb | grep -cFxf /mnt/.a -)" 0
	ok sr-probe type=lvm device-config:device=/dev/vda >/mnt/probe
	copy=$(grep -o '^[[:space:]]*[0-9a-f-]\{36\}$' /mnt/probe | tr -d '[:space:]')
	if [ -z "$copy" ] || [ "$copy" = "$sr" ]; then fail "the probe of the copy finds '$copy'"; fi
	ok sr-introduce uuid="$copy" name-label=copy type=lvm >/dev/null
	copy_pbd=$(ok pbd-create sr-uuid="$copy" host-uuid="$(ok host-list --minimal)" device-config:device=/dev/vda)
	ok pbd-plug uuid="$copy_pbd"
	same "disks of the copy" "$(ok vdi-list sr-uuid="$copy" managed=true --minimal | tr , '\n' | grep -c .)" 4
	# Of each disk there is what was written last, and what its snapshot holds.
	for name in data raw; do
		skip=1048576
		[ $name = data ] || skip=2097152
		found=
		for each in $(ok vdi-list sr-uuid="$copy" name-label=$name managed=true --minimal | tr , ' '); do
			case "$vdi $raw $snapshot $of_raw" in *"$each"*) fail "VDI $each is in both" ;; esac
			plugged "$each" mode=RO
			if cmp -n 16777216 /mnt/pattern "$node" >/dev/null 2>&1; then
				found="snapshot $found"
			else
				must cmp -n $((16777216 - skip)) -i $skip /mnt/pattern "$node"
				must cmp -n $skip /dev/zero "$node"
				found="$found disk"
				one=$each
			fi
			unplugged
		done
		same "what the copy has of disk $name" "$found" "snapshot  disk"
	done
	same "the original, byte for byte" "$(original)" "$before"
	# Both are written at the same time, and neither sees what the other wrote.
	plugged "$one"
	copy_vbd=$vbd copy_node=$node
	plugged "$raw"
	must dd if=/dev/zero of="$copy_node" bs=1M oflag=direct conv=notrunc,fsync count=16
	must cmp -n 14680064 -i 2097152 /mnt/pattern "$node"
	unplugged
	vbd=$copy_vbd
	unplugged
	ok pbd-unplug uuid="$copy_pbd"
	ok sr-forget uuid="$copy"
}

# The worker dies at each step; the next try goes on, and ends with the same.
case_resign() {
	volumes_here
	start_daemon
	resign_original
	ok pbd-unplug uuid="$pbd"
	stop_daemon
	copy_of_original
	for step in begin named images; do
		start_daemon "lv:resign-$step"
		dies sr-create name-label=copy type=relvm device-config:device=/dev/vda
		case $step in
		images)
			start_daemon ''
			half=$(plain vgs --noheadings -o vg_name --devices /dev/vda 2>/dev/null | tr -d ' ')
			half=${half#VG_XenStorage-}
			ok sr-introduce uuid="$half" name-label=half type=lvm >/dev/null
			half_pbd=$(ok pbd-create sr-uuid="$half" host-uuid="$(ok host-list --minimal)" device-config:device=/dev/vda)
			refused "resigned when that was broken off" pbd-plug uuid="$half_pbd"
			refused "being resigned" sr-create name-label=x type=lvm device-config:device=/dev/vda
			ok sr-forget uuid="$half"
			stop_daemon
			;;
		esac
	done
	# Between label and description: what LVM leaves that is killed there.
	copy_of_original
	start_daemon lv:resign-tagged
	dies sr-create name-label=copy type=relvm device-config:device=/dev/vda
	must dd if=/dev/vda of=/mnt/head bs=1M count=12
	start_daemon lv:resign-group
	dies sr-create name-label=copy type=relvm device-config:device=/dev/vda
	must dd if=/dev/vda of=/mnt/label bs=512 count=4
	must dd if=/mnt/head of=/dev/vda bs=1M conv=notrunc,fsync
	must dd if=/mnt/label of=/dev/vda bs=512 conv=notrunc,fsync
	start_daemon ''
	ok pbd-plug uuid="$pbd"
	resigned
	side_by_side
	ok pbd-unplug uuid="$pbd"
	report "kills=$(seconds)"
	stop_daemon
}
