# shellcheck shell=dash
# Thin disks on logical volumes: volumes that follow what guests write, an SR that runs full, a daemon that dies
# meanwhile. Sourced by uml-init.sh after uml-volumes.sh, whose helpers it uses.

# thin_sr DEVICE [KEY=VALUE...]: an SR whose volumes become longer by 16 MiB at least.
thin_sr() {
	device=$1
	shift
	lvm_sr device-config:device="$device" sm-config:allocation=thin sm-config:allocation-quantum=16MiB "$@"
}

# thin_vdis SR COUNT SIZE: makes disks; thin_1, thin_2 ... are their VDIs.
thin_vdis() {
	made=1
	while [ "$made" -le "$2" ]; do
		eval "thin_$made=$(ok vdi-create sr-uuid="$1" name-label="thin $made" virtual-size="$3")"
		made=$((made + 1))
	done
}

thin_vdi() { eval "echo \$thin_$1"; }
node_of() { eval "echo \$node_$1"; }

# thin_plugged COUNT: plugs the first disks; node_N are their nodes.
thin_plugged() {
	at=1
	while [ "$at" -le "$1" ]; do
		plugged "$(thin_vdi "$at")"
		eval "node_$at=$node vbd_$at=$vbd"
		at=$((at + 1))
	done
}

thin_unplugged() {
	at=1
	while [ "$at" -le "$1" ]; do
		eval "vbd=\$vbd_$at"
		unplugged
		at=$((at + 1))
	done
}

# thin_write N FIRST LAST: pieces of 16 MiB of disk N, each the pattern moved by the numbers of both.
thin_write() {
	piece=$2
	while [ "$piece" -le "$3" ]; do
		dd if=/mnt/pattern of="$(node_of "$1")" bs=1M seek=$((piece * 16)) oflag=direct conv=notrunc \
			2>"/mnt/.dd.$1" || return 1
		printf 'disk %6d piece %6d ' "$1" "$piece" | dd of="$(node_of "$1")" bs=512 count=1 \
			seek=$((piece * 32768)) oflag=direct conv=notrunc,sync 2>"/mnt/.dd.$1" || return 1
		piece=$((piece + 1))
	done
}

# thin_writes COUNT FIRST LAST: all disks at once, in the background; `thin_written` waits for them.
thin_writes() {
	writers=
	at=1
	while [ "$at" -le "$1" ]; do
		thin_write "$at" "$2" "$3" &
		writers="$writers $!"
		at=$((at + 1))
	done
}

thin_written() {
	for writer in $writers; do
		wait "$writer" || fail "a writer got an error: $(cat /mnt/.dd.*) / $(tail -n 3 /mnt/daemon.log)"
	done
}

# thin_holds COUNT FIRST LAST: what was written is there.
thin_holds() {
	drop_caches
	at=1
	while [ "$at" -le "$1" ]; do
		thin_holds_of "$at" "$2" "$3"
		at=$((at + 1))
	done
}

# thin_holds_of N FIRST LAST: the same of one disk.
thin_holds_of() {
	piece=$2
	while [ "$piece" -le "$3" ]; do
		must cmp -n $((16777216 - 512)) -i 512:$((piece * 16777216 + 512)) /mnt/pattern "$(node_of "$1")"
		said=$(dd if="$(node_of "$1")" bs=512 count=1 skip=$((piece * 32768)) 2>/dev/null | head -c 24)
		same "the mark of piece $piece of disk $1" "$said" "$(printf 'disk %6d piece %6d' "$1" "$piece")"
		piece=$((piece + 1))
	done
}

# thin_facts N: what the disk process says of its room.
thin_facts() {
	"$tapio_bin/tapio" tap-ctl stats -p "$(thin_pid "$1")" -m "$(thin_minor "$1")" | sed 's/.*"thin": //'
}

thin_row() { "$tapio_bin/tapio" tap-ctl list | grep "VHD-$(thin_vdi "$1")"; }
thin_pid() { thin_row "$1" | sed 's/.*pid=\([0-9]*\).*/\1/'; }
thin_minor() { thin_row "$1" | sed 's/.*minor=\([0-9]*\).*/\1/'; }

# thin_one_waits COUNT: until requests of one of the disks wait for room, which is $waiter.
thin_one_waits() {
	waited=0
	waiter=1
	while ! thin_facts "$waiter" | grep -q '"waiting_ms": [1-9]'; do
		waiter=$((waiter % $1 + 1))
		waited=$((waited + 1))
		[ "$waited" -lt 60 ] || fail "no disk waits: $(thin_facts 1) / $(tail -n 3 /mnt/daemon.log | tr '\n' ' ')"
	done
}

# thin_settled SR WHAT: until no journal is left. A disk may be getting room ahead still.
thin_settled() {
	waited=0
	while volume_names "$1" | tr ' ' '\n' | grep -q _; do
		sleep 0.2
		waited=$((waited + 1))
		[ "$waited" -lt 150 ] || fail "journals stay after $2: $(volume_names "$1")"
	done
}

# thin_shrinks SR FIRST LAST: a guest gives the last pieces of the first disk back, whose volume becomes shorter while it
# is used; then it is written again.
thin_shrinks() {
	before=$(volume_size "$1" "VHD-$thin_1")
	must blkdiscard -o $(($2 * 16777216)) -l $((($3 - $2 + 1) * 16777216)) "$node_1"
	waited=0
	while [ "$(volume_size "$1" "VHD-$thin_1")" -gt $((before - 32)) ]; do
		# The guest goes on meanwhile.
		thin_write 1 0 0 || fail "a disk that gives room back is not written: $(cat /mnt/.dd.1)"
		waited=$((waited + 1))
		[ "$waited" -lt 300 ] || fail "the volume has $before MiB still: $(thin_facts 1) $(tail -n 3 /mnt/daemon.log)"
	done
	report "shorter=$before,$(volume_size "$1" "VHD-$thin_1")"
	thin_holds 1 0 $(($2 - 1))
	thin_write 1 "$2" "$3" || fail "what was given back is not written again: $(cat /mnt/.dd.1)"
	thin_holds 1 0 "$3"
	thin_settled "$1" "what was given back"
}

# messages NAME: how many messages of this name there are.
messages() { ok message-list name="$1" --minimal | tr ',' '\n' | grep -c .; }

until_message() {
	waited=0
	while [ "$(messages "$1")" -lt "$2" ]; do
		sleep 0.1
		waited=$((waited + 1))
		[ "$waited" -lt 200 ] || fail "the administrator is not told $1: $(thin_facts 1) $(tail -n 6 /mnt/daemon.log | tr '\n' ' ')"
	done
}

# Disks that grow at once on an SR that runs full, while the toolstack is slow, is killed, and is started again.
case_thin() {
	volumes_here
	count=${tapio_disks:-3}
	start_daemon
	sr=$(thin_sr /dev/vda)
	thin_vdis "$sr" "$count" 128MiB
	same "the volume of a new disk" "$(volume_size "$sr" "VHD-$thin_1")" 8
	same "how its space is given" "$(ok vdi-param-get uuid="$thin_1" param-name=sm-config param-key=allocation)" thin
	thin_plugged "$count"
	report "plugged=$(seconds)"
	# A slow toolstack.
	ok sr-param-set uuid="$sr" other-config:simulated-latency-ms=300
	thin_writes "$count" 0 1
	thin_written
	ok sr-param-remove uuid="$sr" param-name=other-config param-key=simulated-latency-ms
	report "slow=$(seconds)"
	size=$(volume_size "$sr" "VHD-$thin_1")
	[ "$size" -ge 40 ] || fail "the volume of a disk with 32 MiB has $size"
	waited=0
	while [ "$(ok vdi-param-get uuid="$thin_1" param-name=physical-utilisation)" != $((size << 20)) ]; do
		sleep 0.1
		size=$(volume_size "$sr" "VHD-$thin_1")
		waited=$((waited + 1))
		[ "$waited" -lt 100 ] || fail "the record of a disk with $size MiB does not say so"
	done
	# More than the SR has.
	thin_writes "$count" 2 6
	until_message SR_FULL 1
	thin_one_waits "$count"
	must dd if="$(node_of "$waiter")" of=/dev/null bs=1M count=1 iflag=direct
	report "full=$(seconds)"
	kill -9 "$daemon"
	wait "$daemon"
	sleep 0.5
	for writer in $writers; do kill -0 "$writer" 2>/dev/null && break; done || fail "no writer waits"
	start_daemon
	thin_one_waits "$count"
	report "restarted=$(seconds)"
	must plain pvcreate -ff -y /dev/vdb
	must plain vgextend "$(group_of "$sr")" /dev/vdb
	thin_written
	until_message SR_HAS_ROOM 1
	same "how often the administrator was told" "$(messages SR_FULL)" 1
	report "extended=$(seconds)"
	thin_holds "$count" 0 6
	thin_shrinks "$sr" 3 6
	report "shrunk=$(seconds)"
	# A snapshot takes what was written, and the disk goes on in a volume of its own.
	snapshot=$(ok vdi-snapshot uuid="$thin_1")
	base=$(ok vdi-param-get uuid="$snapshot" param-name=sm-config param-key=vhd-parent)
	same "the size of a snapshot" "$(volume_size "$sr" "VHD-$snapshot")" 8
	size=$(volume_size "$sr" "VHD-$base")
	if [ "$size" -lt 112 ] || [ "$size" -gt 124 ]; then fail "112 MiB were written, and the base copy has $size"; fi
	size=$(volume_size "$sr" "VHD-$thin_1")
	[ "$size" -le 48 ] || fail "the disk holds nothing of its own, and its volume has $size"
	thin_unplugged "$count"
	same "the volume of a disk at rest" "$(volume_size "$sr" "VHD-$thin_1")" 8
	report "holds=$(seconds)"
	stop_daemon
}

# The short form: a disk grows, its worker dies in a growth, its volume becomes shorter while it is used, and another
# worker dies in that.
case_thin_short() {
	volumes_here
	start_daemon lv:room-longer
	sr=$(thin_sr /dev/vda)
	thin_vdis "$sr" 1 128MiB
	thin_plugged 1
	thin_writes 1 0 3
	thin_worker_dies room-longer
	start_daemon lv:spare-ended
	thin_written
	thin_holds 1 0 3
	report "grown=$(seconds)"
	must blkdiscard -o 16777216 -l 50331648 "$node_1"
	thin_worker_dies spare-ended
	start_daemon
	thin_write 1 1 3 || fail "a disk whose worker died is not written: $(cat /mnt/.dd.1)"
	thin_shrinks "$sr" 1 3
	thin_unplugged 1
	must plain lvchange -ay "$(group_of "$sr")/VHD-$thin_1"
	must "$tapio_bin/tapio" vhd-util check -n "/dev/$(group_of "$sr")/VHD-$thin_1"
	must plain lvchange -an "$(group_of "$sr")/VHD-$thin_1"
	report "shrunk=$(seconds)"
	stop_daemon
}

# thin_worker_dies STEP: until the storage worker has died there; then the daemon is killed too.
thin_worker_dies() {
	waited=0
	while ! grep -q "which worked on it, ended" /mnt/daemon.log; do
		sleep 0.05
		waited=$((waited + 1))
		[ "$waited" -lt 1200 ] || fail "no worker died at $1: $(thin_facts 1) $(tail -n 3 /mnt/daemon.log)"
	done
	kill -9 "$daemon"
	wait "$daemon"
	: >/mnt/daemon.log
}

# The storage worker dies at a step of a growth; the next daemon puts it in order, and the disk never notices. A disk for
# each step: one that had to wait for room gets much of it ahead.
case_thin_kills() {
	volumes_here
	start_daemon
	sr=$(thin_sr /dev/vda)
	stop_daemon
	for step in $(echo "${tapio_steps:-room-longer}" | tr , ' '); do
		start_daemon "lv:$step"
		is_settled "$sr"
		thin_vdis "$sr" 1 256MiB
		thin_plugged 1
		thin_writes 1 0 4
		thin_worker_dies "$step"
		start_daemon
		thin_written
		thin_settled "$sr" "a kill at $step"
		thin_holds 1 0 4
		thin_unplugged 1
		must plain lvchange -ay "$(group_of "$sr")/VHD-$thin_1"
		must "$tapio_bin/tapio" vhd-util check -n "/dev/$(group_of "$sr")/VHD-$thin_1"
		must plain lvchange -an "$(group_of "$sr")/VHD-$thin_1"
		ok vdi-destroy uuid="$thin_1"
		stop_daemon
		report "$step=$(seconds)"
	done
}

# What growing costs: `tapio bench thin` on the first disk. tapio_disks, tapio_mib: disks, and what is written to each.
case_thin_bench() {
	volumes_here
	mkdir -p /mnt/bench
	"$tapio_bin/tapio" bench thin --dir /mnt/bench --device /dev/vda --disks "${tapio_disks:-4}" --size "$mib" \
		--rounds "${tapio_rounds:-3}" --json /mnt/bench.json >/mnt/.bench 2>&1 || fail "$(tail -c 600 /mnt/.bench | tr '\n' ' ')"
	reported
}
