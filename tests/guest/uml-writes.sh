# shellcheck shell=dash
# What a power cut leaves of an SR of volumes: all writes of a device are recorded while one of its changes is made, and
# the device of each moment at which everything was durable is attached. Sourced by uml-init.sh after uml-volumes.sh.
# tapio_sr, tapio_vdi: the SR and its VDI, in the second guest.

# only DEVICE: LVM sees this one and no other. A group that it sees twice it leaves alone.
only() { echo "devices { global_filter=[\"a|^$1\$|\",\"r|.*|\"] }" >/etc/lvm/lvm.conf; }

# The same in both guests.
written_pattern() { seq 1 1000000 | head -c 4194304 >/mnt/pattern; }

case_writes_recorded() {
	volumes_here
	load dm-log-writes
	written_pattern
	# What is recorded has been seen by the recorder: the disk below has the same group.
	only /dev/mapper/logged
	must dmsetup create logged --table "0 $(blockdev --getsz /dev/vda) log-writes /dev/vda /dev/vdb"
	must dmsetup mknodes
	start_daemon
	sr=$(lvm_sr device-config:device=/dev/mapper/logged)
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=data virtual-size=8MiB)
	plugged "$vdi"
	must dd if=/mnt/pattern of="$node" bs=1M oflag=direct conv=fsync
	unplugged
	must dmsetup message logged 0 mark begin
	# A snapshot; the snapshot goes; the disk goes into its base copy; it becomes larger.
	snapshot=$(ok vdi-snapshot uuid="$vdi")
	ok vdi-destroy uuid="$snapshot"
	base=$(ok vdi-param-get uuid="$vdi" param-name=sm-config param-key=vhd-parent)
	collected "$sr" "VHD-$base"
	ok vdi-resize uuid="$vdi" disk-size=16MiB
	ok pbd-unplug uuid="$(pbd_of "$sr")"
	stop_daemon
	must dmsetup remove logged
	report "sr=$sr"
	report "vdi=$vdi"
}

case_writes_replayed() {
	volumes_here
	written_pattern
	start_daemon
	group=$(group_of "$tapio_sr")
	count=0
	for device in /dev/vd?; do
		only "$device"
		must plain vgck "$group"
		ok sr-introduce uuid="$tapio_sr" name-label=again type=lvm >/dev/null
		pbd=$(ok pbd-create sr-uuid="$tapio_sr" host-uuid="$(ok host-list --minimal)" device-config:device="$device")
		ok pbd-plug uuid="$pbd"
		odd=$(volume_names "$tapio_sr" | tr ' ' '\n' | grep -v '^MGT$' | grep -v '^VHD-[0-9a-f-]*$')
		same "volumes at moment $count" "$odd" ""
		reads "$tapio_vdi" 4194304
		ok pbd-unplug uuid="$pbd"
		ok sr-forget uuid="$tapio_sr"
		count=$((count + 1))
	done
	stop_daemon
	report "moments=$count"
}
