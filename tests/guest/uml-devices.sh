# shellcheck shell=dash
# SRs of type `udev` (whole devices), and the queues of SRs' devices, by the toolstack's daemon and `xe` in a User-mode
# Linux guest: partitions, software RAID, volumes of device-mapper, devices that come and go. Loop devices over files on a
# tmpfs stand for disks, so that what a discard gives back can be seen. Sourced by uml-init.sh after uml-shares.sh, whose
# helpers it uses.

links=/run/block

# loop FILE: a loop device over it, with its partitions.
loop() { losetup -P -f --show "$1" 2>/mnt/.err || fail "losetup $1: $(cat /mnt/.err)"; }

# waits WHAT COMMAND...: until the command is right.
waits() {
	what=$1
	shift
	waited=0
	until "$@"; do
		sleep 0.1
		waited=$((waited + 1))
		[ "$waited" -lt 300 ] || fail "$what does not come about: $(tail -n 3 /mnt/daemon.log | tr '\n' ' ')"
	done
}

# vdi_of SR IDENTITY: the VDI of a device.
vdi_of() { ok vdi-list sr-uuid="$1" sm-config:identity="$2" --minimal; }

# key VDI KEY: what its sm-config says.
key() { xe vdi-param-get uuid="$1" param-name=sm-config param-key="$2" 2>/dev/null; }

has_vdi() { [ -n "$(vdi_of "$1" "$2")" ]; }
is_missing() { [ "$(ok vdi-param-get uuid="$1" param-name=missing)" = true ]; }

# kib FILE: what it takes on its file system.
kib() { du -k "$1" | cut -f 1; }

# pattern NUMBER: a mebibyte that is full of it.
pattern() { head -c 1048576 /dev/zero | tr '\0' "\\$1"; }

# writes VDI NUMBER: its first mebibyte, through a plugged device, read back there.
writes() {
	plugged "$1"
	pattern "$2" | dd of="$node" bs=64k oflag=direct conv=fsync iflag=fullblock 2>/dev/null || fail "writing to VDI $1"
	pattern "$2" | cmp -s -n 1048576 - "$node" || fail "VDI $1 does not hold $2"
	unplugged
}

# device_reads DEVICE NUMBER: its first mebibyte, without any of our programs.
device_reads() {
	drop_caches
	pattern "$2" | cmp -s -n 1048576 - "$1" || fail "$1 does not hold $2"
}

devices_here() {
	mkdir -p /mnt/bin
	must mount --bind "$tapio_bin" /mnt/bin
	tapio_bin=/mnt/bin
	for writable in /run /tmp; do must mount -t tmpfs tmpfs "$writable"; done
	export HOME=/tmp MDADM_NO_UDEV=1 DM_DISABLE_UDEV=1
	for module in loop nbd fuse md-mod raid1 dm-mod dm-thin-pool bfq; do load "$module"; done
	must ip link set lo up
	mkdir -p "$links"
	truncate -s 64M /mnt/a.img
	printf 'label: gpt\n,12M\n,12M\n,12M\n,12M\n' | sfdisk -q /mnt/a.img >/mnt/.out 2>&1 || fail "sfdisk: $(cat /mnt/.out)"
	truncate -s 24M /mnt/b.img
	truncate -s 24M /mnt/c.img
	a=$(loop /mnt/a.img)
	b=$(loop /mnt/b.img)
	c=$(loop /mnt/c.img)
	must mdadm --create /dev/md0 --run --assume-clean --metadata=1.2 --level=1 --raid-devices=2 "$b" "$c"
}

# Four partitions and an array, by their identities; what this host uses is refused.
given() {
	refused "partuuid-" sr-probe type=udev
	refused "sr-probe lists" sr-create name-label=x type=udev device-config:devices="$a"
	parts=$(grep -o 'partuuid-[0-9a-f-]*' /mnt/.probe | sort -u)
	array=$(grep -o 'md-[0-9a-f]\{8\}-[0-9a-f-]*' /mnt/.probe | head -n 1)
	same "the partitions that the probe lists" "$(echo "$parts" | wc -l)" 4
	[ -n "$array" ] || fail "the probe does not list the array: $(cat /mnt/.probe)"
	ln -s "$b" "$links/member"
	sr=$(ok sr-create name-label=devices type=udev device-config:location="$links" \
		device-config:devices="$(echo "$parts" "$array" dm-TAPIO-thin file-/mnt/late.img | tr '\n ' ,,)")
	same "the devices of the SR" "$(ok vdi-list sr-uuid="$sr" --minimal | tr , '\n' | wc -l)" 6
	number=1
	for part in $parts; do
		writes "$(vdi_of "$sr" "$part")" "$number"
		number=$((number + 1))
	done
	found=0
	for number in 1 2 3 4; do
		for at in 1 2 3 4; do pattern "$number" | cmp -s -n 1048576 - "${a}p$at" && found=$((found + 1)); done
	done
	same "partitions that hold what was written to VDIs" "$found" 4
	mirror=$(vdi_of "$sr" "$array")
	same "the kind of the array" "$(key "$mirror" device-kind)" raid
	writes "$mirror" 7
	device_reads /dev/md0 7
	# What a VDI of this kind cannot do.
	refused "cannot do this\|NOT_SUPPORTED" vdi-snapshot uuid="$mirror"
	refused "cannot do this\|NOT_SUPPORTED" vdi-resize uuid="$mirror" disk-size=1GiB
	refused "cannot do this\|NOT_SUPPORTED" vdi-destroy uuid="$mirror"
	# In use here.
	member=$(vdi_of "$sr" file-/mnt/b.img)
	key "$member" refused | grep -q "software RAID" || fail "the member of an array is not refused: $(key "$member" refused)"
	host=$(ok vm-list is-control-domain=true --minimal)
	vbd=$(ok vbd-create vm-uuid="$host" vdi-uuid="$member" device=autodetect)
	refused "software RAID" vbd-plug uuid="$vbd"
	ok vbd-destroy uuid="$vbd"
	first=$(vdi_of "$sr" "$(echo "$parts" | head -n 1)")
	own=$(key "$first" device)
	must mkfs.ext4 -q -F "$own"
	must mount -t ext4 "$own" "$dir"
	vbd=$(ok vbd-create vm-uuid="$host" vdi-uuid="$first" device=autodetect)
	refused "mounted at $dir" vbd-plug uuid="$vbd"
	must umount "$dir"
	# And while a guest has it, this host cannot use it.
	ok vbd-plug uuid="$vbd"
	if mount -t ext4 "$own" "$dir" 2>/mnt/.err; then fail "a partition was mounted while a guest had it"; fi
	grep -q -i busy /mnt/.err || fail "mounting said: $(cat /mnt/.err)"
	unplugged
	report "given=$(seconds)"
}

# Discards reach the device, also one that cannot write zeroes.
discards() {
	vdi=$(vdi_of "$sr" "$(echo "$parts" | tail -n 1)")
	same "whether a loop device takes discards" "$(key "$vdi" discard)" true
	plugged "$vdi"
	must dd if=/dev/urandom of="$node" bs=1M count=8 oflag=direct conv=fsync
	before=$(kib /mnt/a.img)
	must blkdiscard "$node"
	after=$(kib /mnt/a.img)
	[ $((before - after)) -ge 8000 ] || fail "the file took $before KiB, and takes $after after a discard"
	unplugged
	truncate -s 8M /mnt/meta.img
	truncate -s 48M /mnt/data.img
	must dmsetup create pool --table "0 98304 thin-pool $(loop /mnt/meta.img) $(loop /mnt/data.img) 128 0"
	must dmsetup message pool 0 create_thin 0
	must dmsetup create thin -u TAPIO-thin --table "0 65536 thin /dev/mapper/pool 0"
	waits "the volume's VDI" has_vdi "$sr" dm-TAPIO-thin
	thin=$(vdi_of "$sr" dm-TAPIO-thin)
	same "the kind of the volume" "$(key "$thin" device-kind)" mapped
	plugged "$thin"
	must dd if=/dev/urandom of="$node" bs=1M count=8 oflag=direct conv=fsync
	same "blocks of the pool" "$(pool_used)" 128
	must blkdiscard "$node"
	same "blocks of the pool after a discard" "$(pool_used)" 0
	unplugged
	report "discards=$(seconds)"
}

pool_used() { dmsetup status pool | cut -d' ' -f6 | cut -d/ -f1; }

# Devices come, go, and come back with other names, while the daemon runs and while it does not.
plugs() {
	truncate -s 16M /mnt/late.img
	late=$(loop /mnt/late.img)
	waits "the VDI of a device that came" has_vdi "$sr" file-/mnt/late.img
	vdi=$(vdi_of "$sr" file-/mnt/late.img)
	must losetup -d "$late"
	waits "the loss of a device that went" is_missing "$vdi"
	truncate -s 8M /mnt/linked.img
	linked=$(loop /mnt/linked.img)
	ln -s "$linked" "$links/linked"
	waits "the VDI of a device that was linked" has_vdi "$sr" file-/mnt/linked.img
	# Other names.
	second=$(vdi_of "$sr" "$(echo "$parts" | sed -n 2p)")
	writes "$second" 11
	named=$(key "$second" device)
	stop_daemon
	must losetup -d "$a"
	truncate -s 8M /mnt/other.img
	must losetup "$a" /mnt/other.img
	a=$(loop /mnt/a.img)
	start_daemon
	same "the VDI of a partition that has another name" "$(vdi_of "$sr" "$(echo "$parts" | sed -n 2p)")" "$second"
	[ "$(key "$second" device)" != "$named" ] || fail "the partition is still $named"
	plugged "$second"
	pattern 11 | cmp -s -n 1048576 - "$node" || fail "another device was taken for VDI $second"
	# A daemon that is killed leaves a plugged device plugged.
	kill -9 "$daemon"
	wait "$daemon"
	pattern 12 | dd of="$node" bs=64k oflag=direct conv=fsync iflag=fullblock 2>/dev/null || fail "writing without a daemon"
	start_daemon
	same "whether the device is plugged after a kill" "$(ok vbd-param-get uuid="$vbd" param-name=currently-attached)" true
	unplugged
	device_reads "$(key "$second" device)" 12
	report "plugs=$(seconds)"
}

scheduler() { sed 's/.*\[\(.*\)\].*/\1/' /sys/block/vda/queue/scheduler; }
is_kyber() { [ "$(scheduler)" = kyber ]; }
shown() { ok sr-param-get uuid="$queued" param-name=sm-config param-key=queue-vda; }

# Queues are set, changed live, put back.
queues() {
	queue=/sys/block/vda/queue
	echo 1 >$queue/rotational
	echo kyber >$queue/scheduler
	ahead=$(cat $queue/read_ahead_kb)
	requests=$(cat $queue/nr_requests)
	queued=$(ok sr-create name-label=queued type=udev device-config:devices="serial-$(cat /sys/block/vda/serial)")
	pbd=$(pbd_of "$queued")
	same "the scheduler of a rotating disk" "$(scheduler)" bfq
	refused "is expected" sr-param-set uuid="$queued" other-config:scheduler=fastest
	refused "is expected" sr-param-set uuid="$queued" other-config:nr_requests=1
	ok sr-param-set uuid="$queued" other-config:scheduler=deadline
	same "the scheduler that was asked for" "$(scheduler)" mq-deadline
	ok sr-param-set uuid="$queued" other-config:scheduler-tunables=fifo_batch=3,read_expire=80
	ok sr-param-set uuid="$queued" other-config:nr_requests=32 other-config:read_ahead_kb=64
	same "tunables" "$(cat $queue/iosched/fifo_batch $queue/iosched/read_expire | tr '\n' ' ')" "3 80 "
	same "what the SR shows" "$(shown)" "mq-deadline nr_requests=32 read_ahead_kb=64"
	kill -9 "$daemon"
	wait "$daemon"
	start_daemon
	same "the queue after a kill" "$(shown)" "mq-deadline nr_requests=32 read_ahead_kb=64"
	echo none >$queue/scheduler
	TAPIO_SOCKET=/run/tapio/xapi "$tapio_bin/tapio" doctor --json >/mnt/.out 2>&1
	grep -q queue-changed /mnt/.out || fail "doctor does not see another scheduler: $(cat /mnt/.out)"
	ok sr-param-remove uuid="$queued" param-name=other-config param-key=scheduler
	same "the scheduler that is asked for no longer" "$(scheduler)" bfq
	ok pbd-unplug uuid="$pbd"
	same "the queue of before" "$(scheduler) $(cat $queue/nr_requests $queue/read_ahead_kb | tr '\n' ' ')" \
		"kyber $requests $ahead "
	ok pbd-plug uuid="$pbd"
	same "the scheduler after another plug" "$(scheduler)" bfq
	# Unplugged while nothing runs: what a daemon that died had set is put back.
	kill -9 "$daemon"
	wait "$daemon"
	rm -rf /mnt/state
	start_daemon
	waits "the queue of before" is_kyber
	stop_daemon
	report "queues=$(seconds)"
}

case_devices() {
	devices_here
	start_daemon
	xe sr-probe type=udev >/mnt/.probe 2>&1
	given
	discards
	plugs
	queues
}
