# shellcheck shell=dash
# Stories of the xen lane; xen-init.sh and xen-disks.sh have the words they use.

# The lane itself, with nothing of ours: a guest, and the kernel's own back end, which says what a story may expect of
# the front end.
case_stock() {
	guest plain
	in_guest plain echo hello from guest
	report "stock.said=$said"
	must insmod /xen-blkback.ko
	must dd if=/dev/zero of=/mnt/stock.img bs=1048576 count=64
	must losetup /dev/loop0 /mnt/stock.img
	kind=vbd
	plug plain 0 w "$(back plain 0)/params" /dev/loop0 "$(back plain 0)/physical-device" 7:0
	connected plain 0
	in_guest plain appears xvda
	in_guest plain facts xvda
	report "stock.facts=$(echo $said)"
	in_guest plain put xvda 3 2
	[ "$(dd if=/mnt/stock.img bs=1048576 skip=3 count=2 2>/dev/null | sha256sum | cut -d' ' -f1)" = "$said" ] ||
		fail "other bytes in the image"
	in_guest plain storms xvda 2
	sleep 1
	in_guest plain calm xvda 2
	unplug plain 0
	in_guest plain disappears xvda
	kind=vbd3
	must losetup -d /dev/loop0
	must rmmod xen-blkback
	rm /mnt/stock.img
	must patient 60 xl destroy plain
	report "stock.domains=$(xl list | tail -n +2 | wc -l)"
}

# sample: what xsiostat shows, in one line.
sample() { timeout $((2 * pace)) xsiostat -i 300 2>/dev/null | head -n 6 | tr '\n' '|'; }

# The guest of stories that leave it as they found it: its boot costs seconds.
shared() { [ -n "$domid_shared" ] || vcpus=2 guest shared; }

# A disk that grows into a chain of three while the guest writes; then the guest is gone and another reads it.
case_chain() {
	image=/mnt/chain-base.vhd
	must vhd-util create -n $image -s 64
	create chain
	plug_disk chain 0 $image
	run chain
	connected chain 0
	in_guest chain appears xvda
	in_guest chain facts xvda
	report "chain.facts=$(echo $said)"
	in_guest chain put xvda 0 4
	for layer in middle leaf; do
		image=/mnt/chain-$layer.vhd
		must tapio disk snapshot -p "$pid" -m "$minor" $image
		[ $layer = middle ] && at=3 || at=12
		in_guest chain put xvda $at 3
	done
	report "chain.depth=$(vhd-util query -d -n $image | grep -o '[0-9]*$')"
	in_guest chain get xvda 0 16
	inside=$said
	report "chain.stats=$(tap-ctl stats -p "$pid" -m "$minor")"
	report "chain.xsiostat=$(sample)"
	destroy chain 0
	close_disk "$pid" "$minor"
	must vhd-util check -n $image
	[ "$(digest $image 0 16)" = "$inside" ] || fail "dom0 reads other bytes than the guest"
	vcpus=2 create shared
	plug_disk shared 0 $image r
	run shared
	in_guest shared appears xvda
	in_guest shared get xvda 0 16
	[ "$said" = "$inside" ] || fail "the guest reads other bytes than before"
	in_guest shared cat /sys/block/xvda/ro
	report "chain.read_only=$said"
	unplug shared 0
	in_guest shared disappears xvda
	close_disk "$pid" "$minor"
	rm /mnt/*.vhd
}

# One guest whose driver is loaded anew with rings of each order, its disk plugged and unplugged each time.
case_rings() {
	image=/mnt/rings.vhd
	must vhd-util create -n $image -s 64
	shared
	for order in 0 1 2 3; do
		in_guest shared driver max_ring_page_order=$order max_queues=1
		plug_disk shared 0 $image
		connected shared 0
		in_guest shared appears xvda
		report "rings.$order=$(xenstore-read "$(front shared 0)/ring-page-order" 2>/dev/null || echo 0)"
		in_guest shared facts xvda
		report "rings.$order.facts=$(echo $said)"
		# What was written through the ring before.
		[ "$order" = 0 ] || {
			in_guest shared get xvda $((order * 2 - 2)) 1
			[ "$said" = "$before" ] || fail "order $order reads other bytes"
		}
		in_guest shared put xvda $((order * 2)) 1
		before=$said
		# Several at once, so that there is something in the ring.
		in_guest shared storms xvda 3
		usleep 500000
		in_guest shared calm xvda 3
		report "rings.$order.written=$(echo $said)"
		unplug shared 0
		in_guest shared disappears xvda
		close_disk "$pid" "$minor"
	done
	must vhd-util check -n $image
	rm $image
}

# keeps_files NAME DEVICE: a file system on it, for it flushes; and its files again after it was away.
keeps_files() {
	local tree
	in_guest "$1" mke2fs -q -b 4096 "/dev/$2"
	in_guest "$1" mount -t ext4 "/dev/$2" /mnt
	in_guest "$1" files /mnt
	tree=$said
	in_guest "$1" umount /mnt
	in_guest "$1" drop_caches
	in_guest "$1" mount -t ext4 -o ro "/dev/$2" /mnt
	in_guest "$1" "cat /mnt/file* | sha256sum"
	[ "$said" = "$tree" ] || fail "other files after mounting $2 of $1 again"
	in_guest "$1" umount /mnt
}

# What a front end may do without, and with more of.
case_features() {
	image=/mnt/features.vhd
	must vhd-util create -n $image -s 64
	shared
	for how in plain queues; do
		case $how in
		plain) parameters="feature_persistent=0 max_indirect_segments=0 max_queues=1" ;;
		queues) parameters="feature_persistent=1 max_indirect_segments=128 max_queues=2" ;;
		esac
		in_guest shared driver $parameters
		plug_disk shared 0 $image
		connected shared 0
		in_guest shared appears xvda
		in_guest shared facts xvda
		report "features.$how.facts=$(echo $said)"
		report "features.$how.persistent=$(xenstore-read "$(front shared 0)/feature-persistent" 2>/dev/null || echo 0)"
		in_guest shared put xvda 0 4
		in_guest shared get xvda 0 4
		[ "$(digest $image 0 4)" = "$said" ] || fail "$how: dom0 reads other bytes than the guest"
		report "features.$how.stats=$(tap-ctl stats -p "$pid" -m "$minor")"
		# Discarded blocks read as zeros, and the image gives them back.
		before=$(du -k $image | cut -f1)
		in_guest shared blkdiscard -o 2097152 -l 2097152 /dev/xvda
		in_guest shared get xvda 2 2
		report "features.$how.zeros=$said"
		report "features.$how.given_back=$((before - $(du -k $image | cut -f1)))"
		unplug shared 0
		in_guest shared disappears xvda
		close_disk "$pid" "$minor"
	done
	in_guest shared driver
	plug_disk shared 0 $image
	in_guest shared appears xvda
	keeps_files shared xvda
	unplug shared 0
	in_guest shared disappears xvda
	close_disk "$pid" "$minor"
	must vhd-util check -n $image
	rm $image
}

# A disk with sectors of 4096 bytes: blocks, memory that begins inside a page, a file system.
case_sectors() {
	image=/mnt/sectors.vhd
	must vhd-util create -n $image -s 64
	shared
	in_guest shared driver
	kind=large
	plug_large shared 0 $image
	in_guest shared appears xvda
	in_guest shared facts xvda
	report "sectors.facts=$(echo $said)"
	in_guest shared put xvda 0 4
	written=$said
	in_guest shared get xvda 0 4
	[ "$said" = "$written" ] || fail "the guest reads other bytes than it wrote"
	[ "$(digest $image 0 4)" = "$said" ] || fail "dom0 reads other bytes than the guest"
	in_guest shared unaligned /dev/xvda 4194304
	report "sectors.unaligned=$said"
	in_guest shared get xvda 4 2
	[ "$(digest $image 4 2)" = "$said" ] || fail "dom0 reads other bytes than the guest"
	in_guest shared blkdiscard -o 2097152 -l 2097152 /dev/xvda
	in_guest shared get xvda 2 2
	report "sectors.zeros=$said"
	keeps_files shared xvda
	report "sectors.stats=$(tap-ctl stats -p "$pid" -m "$minor")"
	unplug_large shared 0 "$pid" "$minor" "$id"
	in_guest shared disappears xvda
	kind=vbd3
	close_disk "$pid" "$minor"
	must vhd-util check -n $image
	rm $image
}

# Three disks of one guest, written at the same time, whose data takes different ways: copied, in pages that stay
# mapped, in pages mapped for each request. Their images are on a device, so its driver sees the guest's own pages.
case_moves() {
	must insmod /brd.ko rd_nr=1 rd_size=163840
	must mke2fs -q /dev/ram0
	mkdir -p /mnt/ram
	must mount -t ext4 /dev/ram0 /mnt/ram
	shared
	in_guest shared driver
	n=0
	for how in copy persistent map; do
		kind=vbd-$how image=/mnt/ram/$how.vhd
		tapio-tapback --backend-name "$kind" --movement $how >/tmp/tapback-$how.log 2>&1 &
		eval "tapback_$how=$!"
		must vhd-util create -n $image -s 64
		plug_disk shared $n $image
		eval "disk_$how='$pid $minor'"
		connected shared $n
		n=$((n + 1))
	done
	for disk in xvda xvdb xvdc; do
		in_guest shared appears $disk
		in_guest shared put $disk 0 2
		eval "put_$disk=$said"
	done
	for disk in xvda xvdb xvdc; do in_guest shared storms $disk 1; done
	usleep 500000
	n=0
	for how in copy persistent map; do
		kind=vbd-$how image=/mnt/ram/$how.vhd
		disk=xvd$(echo abc | cut -c$((n + 1)))
		in_guest shared calm $disk 1
		report "moves.$how.written=$(echo $said)"
		in_guest shared get $disk 0 2
		eval "[ \"$said\" = \"\$put_$disk\" ]" || fail "$how: the guest reads other bytes than it wrote"
		in_guest shared get $disk 32 1
		inside=$said
		eval "set -- \$disk_$how"
		report "moves.$how.stats=$(tapio disk stats --json -p "$1" -m "$2" | tr -d '\n')"
		unplug shared $n
		in_guest shared disappears $disk
		close_disk "$@"
		must vhd-util check -n $image
		eval "[ \"$(digest $image 0 2)\" = \"\$put_$disk\" ]" && [ "$(digest $image 32 1)" = "$inside" ] ||
			fail "$how: dom0 reads other bytes than the guest"
		eval "kill \$tapback_$how; wait \$tapback_$how"
		n=$((n + 1))
	done
	kind=vbd3
	must umount /mnt/ram
	must rmmod brd
}

# A second disk comes and goes while the first is written.
case_hotplug() {
	must vhd-util create -n /mnt/first.vhd -s 64
	must vhd-util create -n /mnt/second.vhd -s 64
	create hot
	plug_disk hot 0 /mnt/first.vhd
	first="$pid $minor"
	run hot
	connected hot 0
	in_guest hot appears xvda
	in_guest hot storms xvda 2
	for round in 1 2; do
		plug_disk hot 1 /mnt/second.vhd
		connected hot 1
		in_guest hot appears xvdb
		[ $round = 1 ] || {
			in_guest hot get xvdb 5 2
			[ "$said" = "$written" ] || fail "the second disk has other bytes than it had"
		}
		in_guest hot put xvdb 5 2
		written=$said
		unplug hot 1
		in_guest hot disappears xvdb
		close_disk "$pid" "$minor"
	done
	in_guest hot calm xvda 2
	report "hotplug.written=$(echo $said)"
	# The VM is destroyed in the middle of it.
	in_guest hot put xvda 5 2
	written=$said
	in_guest hot storms xvda 3
	usleep 300000
	destroy hot 0
	close_disk $first
	must vhd-util check -n /mnt/first.vhd
	[ "$(digest /mnt/first.vhd 5 2)" = "$written" ] || fail "what was acknowledged is gone"
	[ "$(digest /mnt/second.vhd 5 2)" = "$(digest /mnt/second.vhd 5 2)" ] || fail "the second disk changes"
	rm /mnt/*.vhd
	report "hotplug.left=$(tap-ctl list | wc -l)"
}

# The disk process is killed under a guest that writes, and brought back: as a toolstack does it, which says where the
# new one is. The guest notices a pause.
case_restart() {
	image=/mnt/restart.vhd
	must vhd-util create -n $image -s 64
	shared
	plug_disk shared 0 $image
	connected shared 0
	in_guest shared appears xvda
	for round in 1 2; do
		in_guest shared storms xvda 3
		usleep $((round * 300000))
		kill -9 "$pid"
		while kill -0 "$pid" 2>/dev/null; do usleep 20000; done
		usleep 200000
		reopen_disk $image "$minor"
		must xenstore-write "$(back shared 0)/params" $image \
			"$(back shared 0)/physical-device-path" "/run/blktap-control/nbd$pid.$minor"
		sleep 1
		in_guest shared calm xvda 3
		report "restart.written.$round=$(echo $said)"
	done
	unplug shared 0
	in_guest shared disappears xvda
	close_disk "$pid" "$minor"
	must vhd-util check -n $image
	rm $image
}

# Grants and event channels by the kernel's devices, without any guest.
case_devices() {
	on_xen >/tmp/on_xen.log 2>&1 || fail "on_xen ended with $?: $(cat /tmp/on_xen.log)"
	sed -n 's/^RESULT /RESULT devices./p' /tmp/on_xen.log
}

# The guest is written to a file and read again, under another number: its disk is connected anew, and what was under
# way when it stopped is done.
case_save() {
	image=/mnt/save.vhd
	must vhd-util create -n $image -s 64
	create saved
	plug_disk saved 0 $image
	run saved
	connected saved 0
	in_guest saved appears xvda
	in_guest saved put xvda 3 2
	written=$said
	in_guest saved storms xvda 2
	old_back=$(back saved 0)
	must xl save saved /mnt/saved
	must xenstore-rm "$old_back"
	close_disk "$pid" "$minor"
	must xl restore -p /mnt/saved
	rm /mnt/saved
	domid_saved=$(xl domid saved)
	plug_disk saved 0 $image
	resume saved
	connected saved 0
	in_guest saved calm xvda 2
	report "save.written=$(echo $said)"
	in_guest saved get xvda 3 2
	[ "$said" = "$written" ] || fail "the guest reads other bytes than before it was saved"
	destroy saved 0
	close_disk "$pid" "$minor"
	must vhd-util check -n $image
	rm $image
}

# Our xenstored replaces itself under a guest that writes and a disk that comes and goes.
case_update() {
	image=/mnt/update.vhd
	must vhd-util create -n $image -s 64
	must vhd-util create -n /mnt/second.vhd -s 64
	shared
	plug_disk shared 0 $image
	first="$pid $minor"
	connected shared 0
	in_guest shared appears xvda
	in_guest shared storms xvda 2
	before=$(xenstore-ls -f | sha256sum)
	must patient 30 xenstore-control live-update /sbin/tapio-xenstored
	[ "$(xenstore-ls -f | sha256sum)" = "$before" ] || fail "the tree is another after the update"
	plug_disk shared 1 /mnt/second.vhd
	connected shared 1
	in_guest shared appears xvdb
	unplug shared 1
	in_guest shared disappears xvdb
	close_disk "$pid" "$minor"
	in_guest shared calm xvda 2
	report "update.written=$(echo $said)"
	unplug shared 0
	in_guest shared disappears xvda
	close_disk $first
	rm /mnt/*.vhd
}
