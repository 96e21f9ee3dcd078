# shellcheck shell=dash
# `tapio profile` on targets whose nature is known, in a User-mode Linux guest: a delay, two halves of different speed,
# stripes of device-mapper and software RAID, a disk with schedulers, an SR. Files on a tmpfs, through loop devices, are
# the storage; dm-delay makes it slow.
# Sourced by uml-init.sh after uml-devices.sh, whose helpers it uses.

# slow NAME FILE MIB MS: a device-mapper device that answers late.
slow() {
	truncate -s "$3M" "$2"
	must dmsetup create "$1" --table "0 $(($3 * 2048)) delay $(loop "$2") 0 $4"
}

# serial NAME FILE MIB MS: a loop device over such a device. Its one worker serves one request at a time.
# 40 ms outweigh the tick of 10 ms by which a read ends earlier or later.
serial() {
	slow "$1" "$2" "$3" "$4"
	must blockdev --setra 0 "/dev/mapper/$1"
	losetup -f --show "/dev/mapper/$1"
}

# profiled TARGET OPTION...: its report as JSON.
profiled() { "$tapio_bin/tapio" profile "$@" --json >/mnt/profile 2>/mnt/.err || fail "tapio profile $*: $(cat /mnt/.err)"; }

# figure KEY: the first number of that name in the report.
figure() { sed -n "s/.*\"$1\": \([0-9.]*\),\{0,1\}$/\1/p" /mnt/profile | head -n 1; }

# near WHAT FOUND EXPECTED PERCENT
near() {
	awk "BEGIN { exit !($2 >= $3 * (1 - $4 / 100) && $2 <= $3 * (1 + $4 / 100)) }" ||
		fail "$1 is $2, not within $4 % of $3: $(tr -d ' \n' </mnt/profile | tail -c 1500)"
}

has_kind() { grep -q "\"kind\": \"$1\"" /mnt/profile || fail "no finding '$1': $(tr -d ' \n' </mnt/profile | tail -c 1500)"; }

profile_delay() {
	slow late /mnt/late.img 64 90
	profiled /dev/mapper/late --quick --seconds 5 --only sweep --depth-max 16
	# The kernel's clock ticks every 10 ms: the device answers after 90 to 100.
	near "the delay in ms" "$(figure latency_ms)" 95 10
	has_kind delay
	has_kind parallel
	report "delay_ms=$(figure latency_ms)"
}

profile_halves() {
	slow near /mnt/near.img 32 40
	slow far /mnt/far.img 32 90
	printf '0 65536 linear /dev/mapper/near 0\n65536 65536 linear /dev/mapper/far 0\n' |
		dmsetup create halves 2>/mnt/.err || fail "dmsetup: $(cat /mnt/.err)"
	profiled /dev/mapper/halves --only scan --points 16 --reads 3 --seconds 30
	# One read after the other begins at a tick and ends at one: 50 and 100 ms.
	near "the ratio of the halves" "$(figure ratio)" 2 5
	has_kind areas
	same "the boundary" "$(figure end)" 33554432
	report "ratio=$(figure ratio)"
}

profile_stripes() {
	one=$(serial one /mnt/one.img 1024 40)
	two=$(serial two /mnt/two.img 1024 40)
	three=$(serial three /mnt/three.img 1024 40)
	printf '0 6291456 striped 3 128 %s 0 %s 0 %s 0\n' "$one" "$two" "$three" |
		dmsetup create stripe 2>/mnt/.err || fail "dmsetup: $(cat /mnt/.err)"
	profiled /dev/mapper/stripe --only geometry --seconds 30
	has_kind stripe
	same "chunk, members and width" "$(figure chunk) $(figure members) $(figure width)" "65536 3 196608"
	grep -q '"measured": true' /mnt/profile || fail "the stripe was not measured: $(tr -d ' \n' </mnt/profile)"
	must dmsetup remove stripe
	must mdadm --create /dev/md5 --run --assume-clean --metadata=1.0 --level=0 --chunk=256 --raid-devices=2 "$one" "$two"
	profiled /dev/md5 --only scan --points 1 --reads 1 --seconds 5
	same "chunk and members of the array" "$(figure chunk) $(figure members)" "262144 2"
	grep -q '"known": true' /mnt/profile || fail "the kernel says what it is: $(tr -d ' \n' </mnt/profile)"
	must mdadm --stop /dev/md5
	must mdadm --create /dev/md6 --run --assume-clean --metadata=1.0 --level=1 --raid-devices=2 "$one" "$two"
	profiled /dev/md6 --only scan --points 1 --reads 1 --seconds 5
	has_kind mirror
	# Members are in use, and are not written.
	if "$tapio_bin/tapio" profile "$one" --destroy-contents >/mnt/.out 2>&1; then fail "a member was written"; fi
	grep -q "md6 lies on" /mnt/.out || fail "a member is refused with: $(cat /mnt/.out)"
}

# A mounted disk is not written. The scheduler is as before, also when Ctrl-C comes in the middle.
profile_disk() {
	queue=/sys/block/vda/queue
	echo mq-deadline >$queue/scheduler
	echo 48 >$queue/nr_requests
	must mkfs.ext4 -q -F "$disk"
	must mount -t ext4 "$disk" "$dir"
	if "$tapio_bin/tapio" profile "$disk" --destroy-contents >/mnt/.out 2>&1; then fail "a mounted disk was written"; fi
	grep -q "mounted at $dir" /mnt/.out || fail "a mounted disk is refused with: $(cat /mnt/.out)"
	must umount "$dir"
	"$tapio_bin/tapio" profile "$disk" --only schedulers,costs --seconds 120 --json >/mnt/profile 2>/mnt/.err &
	run=$!
	waits "another scheduler" is_other_scheduler
	kill -INT "$run"
	wait "$run" || fail "a run that is ended reports: $(cat /mnt/.err)"
	grep -q '"complete": false' /mnt/profile || fail "the report says that it is whole"
	same "the queue after Ctrl-C" "$(scheduler) $(cat $queue/nr_requests)" "mq-deadline 48"
	profiled "$disk" --only schedulers,sweep,costs --quick --depth-max 32 --seconds 2 --destroy-contents \
		--write-settings /mnt/settings
	same "the queue after a run" "$(scheduler) $(cat $queue/nr_requests)" "mq-deadline 48"
	grep -q '"discard_zeroes": true' /mnt/profile || fail "discards give nothing back: $(tr -d ' \n' </mnt/profile)"
	grep -q "^scheduler=" /mnt/settings || fail "no scheduler is advised: $(cat /mnt/settings)"
}

is_other_scheduler() { [ "$(scheduler)" != mq-deadline ]; }

# The settings of a profile are those of an SR; a VDI in an SR is measured, and gone afterwards.
profile_sr() {
	must mkfs.ext4 -q -F "$disk"
	must mount -t ext4 "$disk" "$dir"
	mkdir -p "$dir/sr"
	start_daemon
	sr=$(ok sr-create name-label=profiled type=file device-config:location="$dir/sr" settings=/mnt/settings)
	same "the scheduler of the SR" "$(ok sr-param-get uuid="$sr" param-name=other-config param-key=scheduler)" \
		"$(sed -n 's/^scheduler=//p' /mnt/settings)"
	export TAPIO_SOCKET=/run/tapio/xapi
	profiled "$sr" --scratch-mib 16 --quick --depth-max 16 --seconds 1
	[ "$(figure len)" = 16777216 ] || fail "the VDI has $(figure len) bytes"
	grep -q '"write": true' /mnt/profile || fail "a VDI that was made for it is written"
	same "VDIs that are left" "$(ok vdi-list sr-uuid="$sr" --minimal)" ""
	same "VBDs that are left" "$(ok vbd-list --minimal)" ""
	stop_daemon
}

case_profile() {
	devices_for_profile
	profile_delay
	report "delay=$(seconds)"
	profile_halves
	report "halves=$(seconds)"
	profile_stripes
	report "stripes=$(seconds)"
	profile_disk
	report "disk=$(seconds)"
	profile_sr
	report "sr=$(seconds)"
}

devices_for_profile() {
	mkdir -p /mnt/bin
	must mount --bind "$tapio_bin" /mnt/bin
	tapio_bin=/mnt/bin
	for writable in /run /tmp; do must mount -t tmpfs tmpfs "$writable"; done
	export HOME=/tmp MDADM_NO_UDEV=1 DM_DISABLE_UDEV=1
	for module in loop nbd fuse md-mod raid0 raid1 dm-mod dm-delay bfq kyber-iosched; do load "$module"; done
	must ip link set lo up
}
