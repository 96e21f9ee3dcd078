#!/bin/sh
# First program of the QEMU guest: an initramfs with busybox, the virtio disk driver and nothing else.
# Parameters come from the kernel command line as in uml-init.sh.
/bin/busybox mkdir -p /proc /sys /dev /mnt /bin
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmpfs /mnt
. /lib.sh
disk=/dev/vda
dir=/mnt/disk
mkdir -p "$dir"
if [ -e /virtio_blk.ko ]; then insmod /virtio_blk.ko || fail "the kernel refused virtio_blk.ko"; fi
waited=0
while [ ! -b "$disk" ]; do
	[ "$waited" -lt 50 ] || fail "the guest sees no disk at $disk"
	waited=$((waited + 1))
	usleep 100000
done

case_probe() { describe "$disk"; }

# Both processors write their own half at once, so that both queues carry requests; then the whole is read back.
case_pattern() {
	describe "$disk"
	mib=${tapio_mib:-32}
	for half in 0 1; do
		dd if=/dev/urandom of="/mnt/half$half" bs=1048576 count=$((mib / 2)) 2>/dev/null || fail "making half $half"
	done
	for half in 0 1; do
		taskset $((half + 1)) dd if="/mnt/half$half" of="$disk" bs=65536 seek=$((half * mib * 8)) conv=notrunc,fsync \
			2>"/mnt/err$half" &
		eval "pid$half=$!"
	done
	wait "$pid0" || fail "writing the first half: $(cat /mnt/err0)"
	wait "$pid1" || fail "writing the second half: $(cat /mnt/err1)"
	drop_caches
	wrote=$(cat /mnt/half0 /mnt/half1 | sha256sum | cut -d' ' -f1)
	read=$(dd if="$disk" bs=1048576 count="$mib" 2>/dev/null | sha256sum | cut -d' ' -f1)
	[ "$wrote" = "$read" ] || fail "wrote $wrote, read $read"
	report "pattern=$read"
	for queue in /sys/block/vda/mq/*; do
		report "queue$(basename "$queue")_cpus=$(cat "$queue/cpu_list")"
	done
	grep -h 'virtio.*req' /proc/interrupts | while read -r line; do report "interrupts $line"; done
}

# Write and verify for $tapio_rounds rounds: each writes a slot with fsync, drops the caches and reads an earlier one
# back. The disk process may die meanwhile, or the guest move to another host; it must notice nothing but a pause.
case_load() {
	describe "$disk"
	round=0
	longest=0
	while [ "$round" -lt "${tapio_rounds:-20}" ]; do
		slot=$((round % 8))
		dd if=/dev/urandom of=/mnt/new bs=65536 count=8 2>/dev/null || fail "making round $round"
		at=$(seconds)
		dd if=/mnt/new of="$disk" bs=65536 seek=$((slot * 16)) conv=notrunc,fsync 2>/mnt/err ||
			fail "writing slot $slot in round $round: $(cat /mnt/err)"
		took=$(echo "$(seconds) $at" | awk '{ printf "%d", ($1 - $2) * 1000 }')
		[ "$took" -gt "$longest" ] && longest=$took
		sha256sum </mnt/new >"/mnt/sum$slot"
		drop_caches
		check_slot $(((round + 5) % 8))
		round=$((round + 1))
		report "round=$round"
	done
	drop_caches
	for slot in 0 1 2 3 4 5 6 7; do check_slot "$slot"; done
	if dmesg | grep -i 'i/o error'; then fail "the guest saw an I/O error"; fi
	report "longest_write_ms=$longest"
}

# The disk grows under a guest that has it open; what is new can be written and read.
case_grow() {
	describe "$disk"
	old=$(cat /sys/block/vda/size)
	exec 4<"$disk"
	report ready=1
	waited=0
	while [ "$(cat /sys/block/vda/size)" = "$old" ]; do
		[ "$waited" -lt 300 ] || fail "the disk does not grow"
		waited=$((waited + 1))
		usleep 100000
	done
	new=$(cat /sys/block/vda/size)
	report "grown=$new"
	dd if=/dev/urandom of=/mnt/new bs=65536 count=16 2>/dev/null || fail "making data"
	dd if=/mnt/new of="$disk" bs=65536 seek=$((new / 128 - 16)) conv=notrunc,fsync 2>/mnt/err ||
		fail "writing to what is new: $(cat /mnt/err)"
	drop_caches
	dd if="$disk" bs=65536 skip=$((new / 128 - 16)) count=16 2>/dev/null | cmp - /mnt/new || fail "what is new differs"
}

check_slot() {
	[ -e "/mnt/sum$1" ] || return
	dd if="$disk" bs=65536 skip=$(($1 * 16)) count=8 2>/dev/null | sha256sum | cmp -s - "/mnt/sum$1" ||
		fail "slot $1 differs in round $round"
}

# ext2 by busybox, mounted by the kernel's ext4 driver.
case_fs() {
	describe "$disk"
	must mke2fs -b 4096 "$disk" $((${tapio_mib:-32} * 1024))
	must mount -t ext4 "$disk" "$dir"
	fill "$dir" 2 4
	before=$(tree_digest "$dir")
	must umount "$dir"
	drop_caches
	must mount -t ext4 "$disk" "$dir"
	after=$(tree_digest "$dir")
	must umount "$dir"
	[ "$before" = "$after" ] || fail "digest was $before, and is $after after mounting again"
	report "tree=$after"
}

case "$tapio_case" in
probe | pattern | fs | load | grow) "case_$tapio_case" ;;
*) fail "unknown case '$tapio_case'" ;;
esac
report status=ok
halt_guest
