#!/bin/sh
# First program of a paravirtual guest: busybox and the front end of a disk. Its shell takes commands from the console,
# one per line with a number before it, and frames what they say with `BEGIN n` and `END n STATUS`.
/bin/busybox mkdir -p /proc /sys /dev /mnt /bin /tmp /run /etc
/bin/busybox --install -s /bin
# Xen asks the kernel to end the guest, which starts these.
mkdir -p /sbin
for word in poweroff reboot; do
	printf '#!/bin/sh\n/bin/sync\nexec /bin/%s -f\n' $word >/sbin/$word
	chmod 755 /sbin/$word
done
export PATH=/bin:/sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for dir in /mnt /tmp /run; do mount -t tmpfs tmpfs "$dir"; done
: >/etc/mtab
. /lib.sh
for module in crc16 crc32c_generic mbcache jbd2 ext4; do
	[ ! -e "/$module.ko" ] || insmod "/$module.ko"
done

# driver PARAMETER...: loads the front end, anew where it is loaded.
driver() {
	! grep -q ^xen_blkfront /proc/modules || rmmod xen-blkfront || return
	insmod /xen-blkfront.ko "$@"
}

# appears DEVICE, disappears DEVICE: within a time.
appears() { for try in $(seq 200); do [ ! -b "/dev/$1" ] || return 0; usleep 50000; done; return 1; }
disappears() { for try in $(seq 200); do [ -b "/dev/$1" ] || return 0; usleep 50000; done; return 1; }

# put DEVICE AT_MIB COUNT_MIB: random bytes past the page cache, flushed, so that dom0 finds them in the image; and their
# digest.
put() {
	dd if=/dev/urandom of=/tmp/data bs=1048576 count="$3" 2>/dev/null &&
		dd if=/tmp/data of="/dev/$1" bs=1048576 seek="$2" oflag=direct conv=fsync 2>/dev/null &&
		sha256sum </tmp/data | cut -d' ' -f1
}

# get DEVICE AT_MIB COUNT_MIB: the digest of what is there.
get() { dd if="/dev/$1" bs=1048576 skip="$2" count="$3" iflag=direct 2>/tmp/.err | sha256sum | cut -d' ' -f1; }

# files DIR: fills it; one digest over all.
files() {
	for n in $(seq 6); do
		dd if=/dev/urandom of="$1/file$n" bs=131072 count=4 conv=fsync 2>/dev/null || return
	done
	cat "$1"/file* | sha256sum
}

# storm DEVICE WRITER: writes blocks of 64 KiB into MiB 24 + 8 * WRITER and following, round and round until /tmp/stop is
# there; each is also kept in /tmp/storm.DEVICE.WRITER. A write that fails is told in /tmp/storm.err.
storm() {
	local at=0 first=$((384 + $2 * 128)) me=$1.$2
	dd if=/dev/urandom of="/tmp/seed.$me" bs=65536 count=7 2>/dev/null
	while [ ! -e /tmp/stop ]; do
		dd if="/tmp/seed.$me" bs=65536 skip=$((at % 7)) count=1 2>/dev/null >"/tmp/block.$me"
		dd if="/tmp/block.$me" of="/dev/$1" bs=65536 seek=$((first + at % 64)) oflag=direct conv=notrunc \
			2>"/tmp/dd.$me" || { echo "$me, block $at: $(cat "/tmp/dd.$me")" >>/tmp/storm.err; break; }
		dd if="/tmp/block.$me" of="/tmp/storm.$me" bs=65536 seek=$((at % 64)) conv=notrunc 2>/dev/null
		at=$((at + 1))
		echo $at >"/tmp/written.$me"
	done
}

# storms DEVICE COUNT: in the background; on several devices one after the other.
storms() {
	rm -f /tmp/stop /tmp/storm.err /tmp/storm."$1".* /tmp/written."$1".*
	for writer in $(seq "$2"); do storm "$1" "$writer" & done
}

# calm DEVICE COUNT: ends those of all devices; what they wrote to this one must be there.
calm() {
	: >/tmp/stop
	wait
	[ ! -e /tmp/storm.err ] || { cat /tmp/storm.err; return 1; }
	for writer in $(seq "$2"); do
		length=$(stat -c %s "/tmp/storm.$1.$writer")
		dd if="/dev/$1" bs=65536 skip=$((384 + writer * 128)) count=$((length / 65536)) iflag=direct 2>/dev/null |
			cmp - "/tmp/storm.$1.$writer" || return 1
	done
	cat /tmp/written."$1".*
}

# disks: how many there are.
disks() { names | wc -l; }
names() { for disk in /sys/block/xvd*; do [ ! -e "$disk" ] || echo "${disk##*/}"; done; }

# mark: writes its name into each disk. marked: how many have their own.
mark() {
	for disk in $(names); do
		echo "$disk" | dd of="/dev/$disk" bs=4096 conv=sync oflag=direct 2>/dev/null || return
	done
}
marked() {
	for disk in $(names); do
		[ "$(dd if="/dev/$disk" bs=4096 count=1 iflag=direct 2>/dev/null | head -n 1)" != "$disk" ] || echo "$disk"
	done | wc -l
}

# What the front end found out about a disk.
facts() {
	echo "sectors=$(cat "/sys/block/$1/size")"
	echo "read_only=$(cat "/sys/block/$1/ro")"
	echo "queues=$(ls "/sys/block/$1/mq" | wc -l)"
	echo "max_segments=$(cat "/sys/block/$1/queue/max_segments")"
	echo "logical_block=$(cat "/sys/block/$1/queue/logical_block_size")"
	echo "write_cache=$(tr " " - <"/sys/block/$1/queue/write_cache")"
	echo "fua=$(cat "/sys/block/$1/queue/fua")"
	echo "discard_max=$(cat "/sys/block/$1/queue/discard_max_bytes")"
	echo "depth=$(cat "/sys/block/$1/queue/nr_requests")"
}

# from the kernel's command line: "max_ring_page_order=2,max_indirect_segments=64"
# shellcheck disable=SC2046 # One argument for each word.
driver $(echo "$tapio_front" | tr , ' ')
stty -echo </dev/hvc0
exec </dev/hvc0 >/dev/hvc0 2>&1
echo "AGENT ready"
while read -r number command; do
	echo "BEGIN $number"
	eval "$command"
	echo "END $number $?"
done
halt_guest
