//! The screen of a guest, which costs its emulator nothing while no viewer is connected.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tapio_e2e::guest::Qemu;
use tapio_e2e::needs;
use tapio_e2e::process::poll_until;
use tapio_vm::{MEMORY_MAX, ShutdownKind, VCPUS_MAX};

use crate::conformance::Lab;

const LIMIT: Duration = Duration::from_secs(120);

/// Longer than the three seconds after which QEMU's VNC server looks at its screen, also if no viewer is there.
const WATCHED: Duration = Duration::from_secs(7);

/// Sends bytes, and reads as many as are expected.
fn talk<const N: usize>(stream: &mut UnixStream, bytes: &[u8]) -> [u8; N] {
    let mut said = [0; N];
    stream.write_all(bytes).expect("the screen takes what is sent");
    stream.read_exact(&mut said).expect("the screen answers");
    said
}

/// Connects, and asks for the whole screen; how many of its pixels are not black.
fn lit_pixels(lab: &Lab) -> usize {
    let mut stream = UnixStream::from(lab.driver().open_screen(lab.vm()).expect("a connection"));
    stream.set_read_timeout(Some(LIMIT)).expect("a limit");
    assert_eq!(&talk::<12>(&mut stream, b""), b"RFB 003.008\n");
    assert_eq!(talk::<2>(&mut stream, b"RFB 003.008\n"), [1, 1]);
    assert_eq!(talk::<4>(&mut stream, &[1]), [0; 4]);
    let hello: [u8; 24] = talk(&mut stream, &[1]);
    let be16 = |bytes: &[u8], at: usize| usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]));
    let name_len = be16(&hello, 22);
    stream.read_exact(&mut vec![0; name_len]).expect("its name");
    let size = &hello[..4];
    // Encoding 0: the pixels as they are. The whole of it.
    let head: [u8; 4] = talk(&mut stream, &[&[2, 0, 0, 1, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0][..], size].concat());
    let mut lit = 0;
    for _ in 0..be16(&head, 2) {
        let rect: [u8; 12] = talk(&mut stream, b"");
        let mut pixels = vec![0; be16(&rect, 4) * be16(&rect, 6) * 4];
        stream.read_exact(&mut pixels).expect("its pixels");
        lit += pixels.chunks_exact(4).filter(|pixel| pixel[..3] != [0; 3]).count();
    }
    lit
}

/// How often the emulator's main loop has been woken.
fn wake_ups(lab: &Lab) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", lab.pid())).expect("it is there");
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.expect("a line").trim().parse().expect("a number")
}

#[test]
fn a_screen_wakes_its_emulator_only_for_a_viewer() {
    needs!(Qemu::TOOLS[0]);
    let lab = Lab::new("qemu", LIMIT, |spec| {
        // A balloon and places for processors wake it as little.
        let more = [(MEMORY_MAX, "256"), (VCPUS_MAX, "4")];
        for (key, value) in [("accel", "tcg"), ("vnc", "true"), ("max_disks", "1")].into_iter().chain(more) {
            spec.platform.insert(key.into(), value.into());
        }
    });
    lab.driver().create(&lab.spec).expect("made");
    assert!(lab.driver().has_screen(lab.vm()));
    lab.driver().unpause(lab.vm()).expect("started");
    // What its BIOS says.
    let lit = poll_until(LIMIT, || Some(lit_pixels(&lab)).filter(|lit| *lit > 100));
    assert!(lit.is_some(), "the screen stays black");
    // What the emulator does by itself is what is left then.
    lab.driver().pause(lab.vm()).expect("paused");
    assert!(lit_pixels(&lab) > 100, "a guest that is paused has a screen, too");
    // On a slow host it lets go of its last viewer after seconds. What looks at the screen goes on for ever. Timers of
    // the host's clock run on for a guest that is paused, and a BIOS may have set one: it is let go on a while.
    let mut counted = Vec::new();
    let is_quiet = || {
        let before = wake_ups(&lab);
        std::thread::sleep(WATCHED);
        let woken = wake_ups(&lab) - before;
        counted.push(woken);
        if woken > 0 {
            lab.driver().unpause(lab.vm()).expect("it goes on");
            std::thread::sleep(Duration::from_secs(1));
            lab.driver().pause(lab.vm()).expect("paused");
        }
        (woken == 0).then_some(())
    };
    let is_left_alone = poll_until(LIMIT, is_quiet).is_some();
    assert!(is_left_alone, "something looks at the screen: wake-ups in each {WATCHED:?}: {counted:?}");
    // As many as may be, and no more.
    let viewers: Vec<_> = (0..8).map(|_| lab.driver().open_screen(lab.vm()).expect("a viewer")).collect();
    let error = lab.driver().open_screen(lab.vm()).expect_err("one too many");
    assert!(error.params[0].contains("8 viewers of this screen"), "{error}");
    drop(viewers);
    assert!(poll_until(LIMIT, || lab.driver().open_screen(lab.vm()).ok()).is_some(), "places come back");
    lab.driver().shutdown(lab.vm(), ShutdownKind::Hard, lab.deadline()).expect("ended");
    assert!(!lab.driver().has_screen(lab.vm()) && lab.driver().open_screen(lab.vm()).is_err());
}
