# shellcheck shell=dash
# Words about disks for the stories of the xen lane: what a toolstack does in xenstore, and what one asks disk processes.

# The back end's kind: tapback's.
kind=vbd3

# devid N: xvda, xvdb, ...
devid() { echo $((51712 + 16 * $1)); }

# back NAME N, front NAME N: the directories of disk N.
back() { echo "/local/domain/0/backend/$kind/$(domid "$1")/$(devid "$2")"; }
front() { echo "/local/domain/$(domid "$1")/device/vbd/$(devid "$2")"; }

# plug NAME N MODE KEY VALUE...: makes disk N known to both ends, as a toolstack does: directories with their owners
# first, then all keys in one transaction. The keys given are the back end's own.
plug() {
	local mode=$3 id domid back front letter
	domid=$(domid "$1") id=$(devid "$2") back=$(back "$1" "$2") front=$(front "$1" "$2")
	letter=$(echo abcdefgh | cut -c$(($2 + 1)))
	shift 3
	must xenstore-write "$back" "" "$front" ""
	must xenstore-chmod "$back" n0 "r$domid"
	must xenstore-chmod "$front" "n$domid" r0
	must xenstore-write "$back/frontend" "$front" "$back/frontend-id" "$domid" "$back/online" 1 \
		"$back/mode" "$mode" "$back/dev" "xvd$letter" "$back/device-type" disk "$back/removable" 0 \
		"$back/bootable" 1 "$back/type" phy "$back/hotplug-status" connected "$@" "$back/state" 1 \
		"$front/backend" "$back" "$front/backend-id" 0 "$front/virtual-device" "$id" \
		"$front/device-type" disk "$front/state" 1
}

# state_is PATH STATE
state_is() { [ "$(xenstore-read "$1/state" 2>/dev/null)" = "$2" ]; }

# connected NAME N: waits until both ends are.
connected() {
	wait_for 30 "the back end of disk $2 of $1 to connect" state_is "$(back "$1" "$2")" 4
	wait_for 30 "the front end of disk $2 of $1 to connect" state_is "$(front "$1" "$2")" 4
}

# unplug NAME N: the guest agrees.
unplug() {
	local back front
	back=$(back "$1" "$2") front=$(front "$1" "$2")
	must xenstore-write "$back/online" 0 "$back/state" 5
	wait_for 30 "disk $2 of $1 to be unplugged" state_is "$back" 6
	must xenstore-rm "$front"
	must xenstore-rm "$back"
}

# destroy NAME N...: the guest at once, and what xl does not know: its disks.
destroy() {
	local name=$1
	shift
	must patient 60 xl destroy "$name"
	for n in "$@"; do must xenstore-rm "$(back "$name" "$n")"; done
}

# --- disk processes ---

# open_disk IMAGE [MINOR]: a disk process; $pid and $minor.
open_disk() {
	local said
	said=$(tap-ctl create -a "vhd:$1" 2>&1) || fail "tap-ctl create $1: $said"
	minor=${said##*tapdisk-}
	find_disk "$minor"
}

# find_disk MINOR: $pid.
find_disk() {
	pid=$(tap-ctl list -m "$1" | sed -n 's/^pid=\([0-9]*\) .*/\1/p')
	[ -n "$pid" ] || fail "no process has disk $1: $(tap-ctl list)"
}

# plug_disk NAME N IMAGE [MODE]: a disk process for the image, and its disk in the guest.
plug_disk() {
	local back
	open_disk "$3"
	back=$(back "$1" "$2")
	plug "$1" "$2" "${4:-w}" "$back/params" "$3" "$back/physical-device-path" \
		"/run/blktap-control/nbd$pid.$minor"
}

# plug_large NAME N IMAGE: as plug_disk, with sectors of 4096 bytes, which tapback never finds on a disk of ours: so what
# tapback does is done by hand. $id is the front end's.
plug_large() {
	local back front
	open_disk "$3"
	back=$(back "$1" "$2") front=$(front "$1" "$2")
	plug "$1" "$2" w "$back/feature-flush-cache" 1 "$back/feature-discard" 1 "$back/discard-granularity" 4096 \
		"$back/feature-max-indirect-segments" 64
	must xenstore-write "$back/state" 2
	wait_for 30 "the ring of disk $2 of $1" state_is "$front" 3
	must tapio disk front add -p "$pid" -m "$minor" --blkif "$(domid "$1")/$(devid "$2")" --sector-size 4096 \
		--max-indirect 64 --ring "$(xenstore-read "$front/ring-ref")@$(xenstore-read "$front/event-channel")"
	id=$(tapio disk front list -p "$pid" -m "$minor" | awk '/ xen:/ { print $1 }')
	must xenstore-write "$back/sectors" 131072 "$back/sector-size" 4096 "$back/info" 0 "$back/state" 4
	connected "$1" "$2"
}

# unplug_large NAME N PID MINOR ID
unplug_large() {
	local back front
	back=$(back "$1" "$2") front=$(front "$1" "$2")
	must xenstore-write "$back/online" 0 "$back/state" 5
	wait_for 30 "disk $2 of $1 to be given back" state_is "$front" 6
	must tapio disk front remove -p "$3" -m "$4" "$5"
	must xenstore-rm "$front"
	must xenstore-rm "$back"
}

# close_disk PID MINOR: when no process has it any more, which the back end may still have to notice.
close_disk() {
	wait_for 20 "disk $2 to be given up" tap-ctl close -p "$1" -m "$2"
	must tap-ctl detach -p "$1" -m "$2"
	must tap-ctl free -m "$2"
}

# digest IMAGE AT_MIB COUNT_MIB: of the disk's content, read from dom0 through the whole chain.
digest() {
	vhd-util read -n "$1" -r $(($2 * 2048)) -c $(($3 * 2048)) | sha256sum | cut -d' ' -f1
}

# reopen_disk IMAGE MINOR: a new process for a disk whose process died.
reopen_disk() {
	local said
	tap-ctl free -m "$2" 2>/dev/null
	said=$(tap-ctl create -a "vhd:$1" 2>&1) || fail "tap-ctl create $1 again: $said"
	[ "${said##*tapdisk-}" = "$2" ] || fail "disk $2 came back as ${said##*/}"
	find_disk "$2"
}
