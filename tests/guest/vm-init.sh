#!/bin/sh
# First program of a VM in which disks are devices of its own kernel: an initramfs with busybox, our
# programs, the tools of two file systems, and the drivers that the hosts of the other lanes lack.
# Parameters come from the kernel command line as in uml-init.sh.
/bin/busybox mkdir -p /proc /sys /dev /mnt /bin /tmp /run /etc
/bin/busybox --install -s /bin
export PATH=/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
for dir in /mnt /tmp /run /dev/shm; do mount -t tmpfs tmpfs "$dir"; done
. /lib.sh
for module in libcrc32c xfs loop nbd ublk_drv; do
	[ ! -e "/$module.ko" ] || insmod "/$module.ko" || fail "the kernel refused $module.ko"
done
dir=/mnt/disk
mkdir -p "$dir"
: >/etc/mtab

# start HOW MINOR IMAGE: a disk process whose disk is a device; sets $pid and $device.
start() {
	socket=$(tapio-disk --image "vhd:$3" --minor "$2" --device "$1" 2>/mnt/.err) || fail "$1: $(cat /mnt/.err)"
	pid=${socket##*ctl}
	device=$(tapio disk list | sed -n "s/.* block \(.*\) (1 clients)/\1/p")
	[ -b "$device" ] || fail "$1: no device: $(tapio disk list | tr '\n' ' ')"
}

stop() {
	must tapio disk quit -p "$pid"
	while kill -0 "$pid" 2>/dev/null; do usleep 20000; done
}

crash() {
	kill -9 "$pid"
	while kill -0 "$pid" 2>/dev/null; do usleep 20000; done
}

make_fs() {
	case $1 in
	ext4) must mkfs.ext4 -q -F "$device" ;;
	xfs) must mkfs.xfs -q -f "$device" ;;
	esac
}

check_fs() {
	case $1 in
	ext4) must e2fsck -f -n "$device" ;;
	xfs) must xfs_repair -n "$device" ;;
	esac
}

# Make, fill, check, compare and trim both file systems on a device of one kind.
file_systems() {
	how=$1 minor=$2 image=/tmp/$1.vhd
	must tapio vhd-util create -n "$image" -s 320
	start "$how" "$minor" "$image"
	name=$(basename "$device")
	report "$how.device=$device"
	report "$how.sectors=$(cat "/sys/block/$name/size")"
	report "$how.write_cache=$(cat "/sys/block/$name/queue/write_cache")"
	report "$how.fua=$(cat "/sys/block/$name/queue/fua")"
	report "$how.discard_max=$(cat "/sys/block/$name/queue/discard_max_bytes")"
	report "$how.write_zeroes_max=$(cat "/sys/block/$name/queue/write_zeroes_max_bytes")"
	[ ! -e "/sys/block/$name/loop/dio" ] || report "$how.direct=$(cat "/sys/block/$name/loop/dio")"
	for fs in ext4 xfs; do
		make_fs $fs
		must mount -t $fs "$device" "$dir"
		fill "$dir" 2 4
		before=$(tree_digest "$dir")
		[ $fs != ext4 ] || ! tapio disk device detach "$minor" 2>/dev/null || fail "$how: detached while mounted"
		must umount "$dir"
		check_fs $fs
		drop_caches
		must mount -t $fs "$device" "$dir"
		[ "$before" = "$(tree_digest "$dir")" ] || fail "$how: $fs reads back other files"
		rm "$dir/file0"
		must fstrim "$dir"
		must umount "$dir"
		check_fs $fs
		report "$how.$fs=$before"
	done
	must tapio disk device detach "$minor"
	[ "$(cat "/sys/block/$name/size" 2>/dev/null || echo 0)" = 0 ] || fail "$device is still there"
	again=$(tapio disk device attach "$minor" --how "$how" 2>&1) || fail "$how again: $again"
	device=$again
	check_fs xfs
	stop
	[ "$(cat "/sys/block/$name/size" 2>/dev/null || echo 0)" = 0 ] || fail "$device outlived its process"
	must tapio vhd-util check -n "$image"
}

in_flight() { [ "$(awk '{ print $1 + $2 }' "/sys/block/${device#/dev/}/inflight")" -gt 0 ]; }

# survive HOW MINOR ROUNDS: the process is killed while a file is written, and started again; the writer must notice
# nothing. The last time it stands still before, so that requests surely wait for their answers.
survive() {
	how=$1 minor=$2 image=/tmp/$1.vhd
	start "$how" "$minor" "$image"
	make_fs ext4
	must mount -t ext4 "$device" "$dir"
	dd if=/dev/urandom of=/mnt/source bs=65536 count=128 2>/dev/null
	want=$(sha256sum </mnt/source)
	round=0
	while [ "$round" -lt "$3" ]; do
		: >/mnt/done
		[ "$round" -lt $(($3 - 1)) ] || kill -STOP "$pid"
		(
			dd if=/mnt/source of="$dir/file$round" bs=65536 conv=fsync 2>/mnt/dd.err && echo ok >/mnt/done ||
				echo failed >/mnt/done
		) &
		if [ "$round" = $(($3 - 1)) ]; then
			until in_flight; do usleep 10000; done
		elif [ "$round" != 0 ]; then
			usleep $((round * 60000))
		fi
		was=$device
		if [ "$round" = 1 ]; then
			# Under another leaf it is still the same disk.
			must tapio disk snapshot -p "$pid" -m "$minor" "/tmp/$how-leaf.vhd"
			image=/tmp/$how-leaf.vhd
		fi
		crash
		# Requests in flight wait; none gets an error.
		usleep 200000
		start "$how" "$minor" "$image"
		[ "$device" = "$was" ] || fail "$how: $was came back as $device"
		wait
		[ "$(cat /mnt/done)" = ok ] || fail "$how: the writer noticed: $(cat /mnt/done /mnt/dd.err)"
		drop_caches
		[ "$(sha256sum <"$dir/file$round")" = "$want" ] || fail "$how: round $round reads back other bytes"
		round=$((round + 1))
	done
	must umount "$dir"
	check_fs ext4
	stop
	must tapio vhd-util check -n "$image"
	report "$how.survived=$round"
}

# A process that does not answer for a while is waited for.
stall() {
	start "$1" "$2" "/tmp/$1.vhd"
	must mount -t ext4 "$device" "$dir"
	(dd if=/mnt/source of="$dir/stalled" bs=65536 conv=fsync 2>/dev/null && echo ok >/mnt/done) &
	: >/mnt/done
	kill -STOP "$pid"
	sleep 12
	kill -CONT "$pid"
	wait
	[ "$(cat /mnt/done)" = ok ] || fail "$1: the writer noticed that the process stood still"
	drop_caches
	[ "$(sha256sum <"$dir/stalled")" = "$(sha256sum </mnt/source)" ] || fail "$1: other bytes after standing still"
	must umount "$dir"
	check_fs ext4
	stop
	report "$1.stalled=1"
}

# What waits for a process that does not come back can be disconnected.
give_up() {
	start "$1" "$2" "/tmp/$1.vhd"
	was=$device
	crash
	must tapio vhd-util create -n /tmp/other.vhd -s 8
	said=$(tapio-disk --image vhd:/tmp/other.vhd --minor "$2" --device "$1" 2>&1) && fail "$1: $was went to another disk"
	report "$1.refused=$said"
	cleaned=$(tapio disk device clean --waiting 2>&1)
	[ "$cleaned" = "$was" ] || fail "$1: cleaned '$cleaned', not $was"
	start "$1" "$2" /tmp/other.vhd
	stop
	rm /tmp/other.vhd
}

case_probe() { tapio disk device probe | while read -r line; do report "probe.${line%% *}=${line#* }"; done; }

case_devices() {
	case_probe
	file_systems fuse 3
	for how in ublk nbd; do
		begin=$(seconds)
		file_systems $how 3
		[ $how = ublk ] && survive $how 3 4 || { survive $how 3 3 && stall $how 3; }
		give_up $how 3
		report "$how.seconds=$(echo "$(seconds) $begin" | awk '{ print $1 - $2 }')"
		rm -f /tmp/*.vhd
	done
}

case "$tapio_case" in
probe | devices) "case_$tapio_case" ;;
*) fail "unknown case '$tapio_case'" ;;
esac
report status=ok
halt_guest
