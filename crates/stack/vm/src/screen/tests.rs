//! A viewer that decodes what it is sent, and has at the end what the emulator shows.

use std::io::{self, Cursor, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use super::session::{Event, Session};
use super::{Key, Motion, Picture, Screen, serve};
use crate::supervise::Stop;

/// A picture that a seed determines: plain areas, areas of two colours and noise.
fn pixels(width: usize, height: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    let mut pixels = vec![0; width * height * 3];
    for _ in 0..12 {
        let (kind, colour, ink) = (random() % 3, random(), random());
        let (left, top) = (random() as usize % width, random() as usize % height);
        let (right, bottom) = (left + random() as usize % 60, top + random() as usize % 60);
        for y in top..bottom.min(height) {
            for x in left..right.min(width) {
                let pixel = match kind {
                    0 => colour,
                    1 if (x + y / 3) % 5 == 0 => ink,
                    1 => colour,
                    _ => random(),
                };
                pixels[(y * width + x) * 3..][..3].copy_from_slice(&pixel.to_be_bytes()[1..]);
            }
        }
    }
    pixels
}

fn ppm(width: usize, height: usize, pixels: &[u8]) -> Vec<u8> {
    [format!("P6\n{width} {height}\n255\n").as_bytes(), pixels].concat()
}

/// What a viewer has of a screen.
#[derive(Default)]
struct Viewer {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
    has_codes: bool,
}

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (taken, rest) = self.0.split_first_chunk().expect("a whole message");
        self.0 = rest;
        *taken
    }

    fn be16(&mut self) -> usize {
        u16::from_be_bytes(self.take()).into()
    }

    fn pixel(&mut self) -> [u8; 3] {
        let [blue, green, red, _] = self.take();
        [red, green, blue]
    }
}

impl Viewer {
    fn set(&mut self, x: usize, y: usize, pixel: [u8; 3]) {
        assert!(x < self.width && y < self.height);
        self.pixels[(y * self.width + x) * 3..][..3].copy_from_slice(&pixel);
    }

    fn resize(&mut self, width: usize, height: usize) {
        (self.width, self.height, self.pixels) = (width, height, vec![9; width * height * 3]);
    }

    /// Takes whole updates.
    fn take(&mut self, bytes: &[u8]) {
        let mut bytes = Bytes(bytes);
        while !bytes.0.is_empty() {
            assert_eq!(bytes.take::<2>(), [0, 0], "an update");
            for _ in 0..bytes.be16() {
                let (x, y, width, height) = (bytes.be16(), bytes.be16(), bytes.be16(), bytes.be16());
                match i32::from_be_bytes(bytes.take()) {
                    0 => {
                        for at in 0..width * height {
                            let pixel = bytes.pixel();
                            self.set(x + at % width, y + at / width, pixel);
                        }
                    }
                    5 => self.hextile(&mut bytes, x, y, width, height),
                    -223 => self.resize(width, height),
                    -258 => self.has_codes = true,
                    other => panic!("encoding {other}"),
                }
            }
        }
    }

    fn hextile(&mut self, bytes: &mut Bytes<'_>, x: usize, y: usize, width: usize, height: usize) {
        let (mut ground, mut ink) = (None, None);
        for top in (y..y + height).step_by(16) {
            for left in (x..x + width).step_by(16) {
                let (wide, high) = (16.min(x + width - left), 16.min(y + height - top));
                let [mask] = bytes.take();
                if mask & 1 != 0 {
                    for at in 0..wide * high {
                        let pixel = bytes.pixel();
                        self.set(left + at % wide, top + at / wide, pixel);
                    }
                    (ground, ink) = (None, None);
                    continue;
                }
                if mask & 2 != 0 {
                    ground = Some(bytes.pixel());
                }
                if mask & 4 != 0 {
                    ink = Some(bytes.pixel());
                }
                (0..wide * high)
                    .for_each(|at| self.set(left + at % wide, top + at / wide, ground.expect("a ground")));
                let parts = if mask & 8 != 0 { bytes.take::<1>()[0] } else { 0 };
                for _ in 0..parts {
                    let [place, size] = bytes.take::<2>().map(usize::from);
                    let (w, h) = ((size >> 4) + 1, (size & 15) + 1);
                    assert!((place >> 4) + w <= wide && (place & 15) + h <= high, "within its tile");
                    for at in 0..w * h {
                        self.set(
                            left + (place >> 4) + at % w,
                            top + (place & 15) + at / w,
                            ink.expect("an ink"),
                        );
                    }
                }
            }
        }
    }
}

/// Everything that is to be sent.
fn drained(session: &mut Session) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let len = session.pending().len();
        if len == 0 {
            return all;
        }
        // In pieces that end anywhere.
        let len = len.min(1000);
        all.extend_from_slice(&session.pending()[..len]);
        session.sent(len);
    }
}

fn told(session: &mut Session, bytes: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    bytes.iter().for_each(|byte| session.receive(&[*byte], &mut events).expect("it is right"));
    events
}

const ASK: [u8; 10] = [3, 1, 0, 0, 0, 0, 0, 64, 0, 64];

fn greeted(session: &mut Session, encodings: &[i32]) -> Vec<Event> {
    assert_eq!(drained(session), b"RFB 003.008\n");
    told(session, b"RFB 003.008\n");
    assert_eq!(drained(session), [1, 1]);
    told(session, &[1]);
    assert_eq!(drained(session), [0; 4]);
    told(session, &[1]);
    drained(session);
    let count = encodings.len() as u8;
    let named: Vec<u8> = encodings.iter().flat_map(|one| one.to_be_bytes()).collect();
    told(session, &[&[2, 0, 0, count][..], &named].concat())
}

#[test]
fn a_viewer_has_what_the_emulator_shows() {
    for encodings in [&[5, 0, -223, -258][..], &[0][..], &[1, 7, 5, -223][..]] {
        let (mut width, mut height) = (100, 70);
        let mut session = Session::new("guest", (100, 70));
        greeted(&mut session, encodings);
        let mut viewer = Viewer::default();
        viewer.resize(width, height);
        assert!(!session.wants_picture(), "it has not asked");
        let resizes = encodings.contains(&-223);
        for round in 0..12 {
            if round % 4 == 3 {
                (width, height) = (33 + round * 7, 90 - round * 5);
            }
            let shown = pixels(width, height, round as u32 / 2);
            for _ in 0..2 {
                told(&mut session, &ASK);
                if session.wants_picture() {
                    let picture = Picture::open(Cursor::new(ppm(width, height, &shown))).unwrap();
                    let has_changed = session.show(picture).unwrap();
                    let bytes = drained(&mut session);
                    assert_eq!(has_changed, !bytes.is_empty());
                    viewer.take(&bytes);
                }
            }
            assert_eq!(viewer.has_codes, encodings.contains(&-258));
            if resizes {
                assert_eq!((viewer.width, viewer.height), (width, height));
                assert!(viewer.pixels == shown, "round {round}, {encodings:?}");
            } else {
                assert_eq!((viewer.width, viewer.height), (100, 70));
                let same = (0..width.min(100)).all(|x| viewer.pixels[x * 3] == shown[x * 3]);
                assert!(same, "round {round}, {encodings:?}");
            }
        }
        // Nothing has changed: the viewer waits on, until it asks for everything.
        let shown = pixels(width, height, 5);
        let picture = || Picture::open(Cursor::new(ppm(width, height, &shown))).unwrap();
        told(&mut session, &ASK);
        assert!(!session.show(picture()).unwrap() && session.wants_picture());
        told(&mut session, &[3, 0, 0, 0, 0, 0, 0, 64, 0, 64]);
        assert!(session.show(picture()).unwrap());
    }
}

#[test]
fn older_viewers_are_greeted_as_they_expect() {
    let mut session = Session::new("guest", (1, 1));
    told(&mut session, b"RFB 003.003\n");
    assert_eq!(drained(&mut session), b"RFB 003.008\n\0\0\0\x01");
    told(&mut session, &[0]);
    assert_eq!(drained(&mut session)[..4], [0, 1, 0, 1]);
    let mut session = Session::new("guest", (1, 1));
    told(&mut session, b"RFB 003.007\n");
    assert_eq!(drained(&mut session)[12..], [1, 1]);
    told(&mut session, &[1]);
    assert!(drained(&mut session).is_empty(), "3.7 has no result");
}

#[test]
fn what_a_viewer_does_is_understood() {
    let mut session = Session::new("guest", (640, 480));
    greeted(&mut session, &[-258, 5]);
    let events = told(
        &mut session,
        &[4, 1, 0, 0, 0, 0, 0xff, 0x0d, 6, 0, 0, 0, 0, 0, 0, 3, 4, 4, 4, 5, 2, 1, 0, 0, 9],
    );
    assert_eq!(events, [Event::Symbol(0xff0d, true), Event::Pointer { buttons: 2, x: 256, y: 9 }]);
    told(&mut session, &ASK);
    session.show(Picture::open(Cursor::new(ppm(640, 480, &[0; 640 * 480 * 3]))).unwrap()).unwrap();
    let events = told(&mut session, &[255, 0, 0, 1, 0, 0, 0, 97, 0, 0, 0, 30]);
    assert_eq!(events, [Event::Code(30, true)]);
}

#[test]
fn what_is_wrong_is_named() {
    let refused = |bytes: &[u8]| Session::new("guest", (1, 1)).receive(bytes, &mut Vec::new()).unwrap_err();
    assert!(refused(b"GET / HTTP/1").contains("does not speak RFB"));
    assert!(refused(b"RFB 004.000\n").contains("does not speak RFB"));
    assert!(refused(b"RFB 003.008\n\x02").contains("security type 2"));
    let hello = b"RFB 003.008\n\x01\x01";
    let later = |bytes: &[u8]| refused(&[hello, bytes].concat());
    assert!(later(&[9]).contains("kind 9"));
    assert!(later(&[2, 0, 255, 255]).contains("65535 encodings"));
    assert!(later(&[6, 0, 0, 0, 255, 0, 0, 0]).contains("clipboard"));
    assert!(later(&[255; 12]).contains("not agreed on"));
    assert!(later(&[&[0; 4][..], &[24], &[0; 15]].concat()).contains("24 bits"));
}

/// A screen of a test: what is shown, and what was typed.
struct Shown {
    picture: Vec<u8>,
    typed: Sender<String>,
    has_ended: Arc<AtomicBool>,
}

impl Screen for Shown {
    fn is_there(&self) -> bool {
        !self.has_ended.load(Ordering::Acquire)
    }

    fn picture(&mut self) -> io::Result<Box<dyn Read + '_>> {
        Ok(Box::new(&self.picture[..]))
    }

    fn keys(&mut self, strokes: &[(Key, bool)]) -> io::Result<()> {
        self.typed.send(format!("{strokes:?}")).map_err(io::Error::other)
    }

    fn has_places(&mut self) -> bool {
        false
    }

    fn pointer(&mut self, motion: Option<Motion>, buttons: &[(u8, bool)]) -> io::Result<()> {
        self.typed.send(format!("{motion:?} {buttons:?}")).map_err(io::Error::other)
    }
}

fn served(
    stop: Arc<Stop>,
    has_ended: &Arc<AtomicBool>,
) -> (UnixStream, thread::JoinHandle<io::Result<()>>, Receiver<String>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let (typed, said) = channel();
    let has_ended = Arc::clone(has_ended);
    let mut screen = Shown { picture: ppm(64, 64, &pixels(64, 64, 1)), typed, has_ended };
    (theirs, thread::spawn(move || serve(ours, "guest", &stop, &mut screen)), said)
}

#[test]
fn a_connection_shows_types_and_ends() {
    let (mut viewer, serving, said) = served(Stop::new().unwrap(), &Arc::default());
    let mut hello = [0; 12];
    viewer.read_exact(&mut hello).unwrap();
    viewer.write_all(&[b"RFB 003.008\n", &[1, 1][..], &ASK, &[4, 1, 0, 0, 0, 0, 0, 97]].concat()).unwrap();
    let mut head = [0; 2 + 4 + 24 + 5 + 4];
    viewer.read_exact(&mut head).unwrap();
    assert_eq!(
        (&head[6..10], &head[30..35], &head[35..37]),
        (&[0, 64, 0, 64][..], &b"guest"[..], &[0, 0][..])
    );
    assert_eq!(said.recv_timeout(Duration::from_secs(60)).unwrap(), "[(Named(\"a\"), true)]");
    drop(viewer);
    serving.join().unwrap().ok();
    assert_eq!(said.recv().unwrap(), "[(Named(\"a\"), false)]", "a key that was held");
}

#[test]
fn a_connection_ends_with_the_driver_and_at_nonsense() {
    let stop = Stop::new().unwrap();
    let (viewer, serving, _said) = served(stop.clone(), &Arc::default());
    stop.stop();
    serving.join().unwrap().unwrap();
    drop(viewer);
    let (mut viewer, serving, _said) = served(Stop::new().unwrap(), &Arc::default());
    viewer.write_all(b"GET / HTTP/1.1\r\n").unwrap();
    let why = serving.join().unwrap().unwrap_err().to_string();
    assert!(why.contains("does not speak RFB"), "{why}");
}

#[test]
fn a_viewer_that_asks_for_nothing_is_disconnected_when_the_emulator_has_ended() {
    let has_ended = Arc::new(AtomicBool::new(false));
    let (mut viewer, serving, _said) = served(Stop::new().unwrap(), &has_ended);
    viewer.read_exact(&mut [0; 12]).unwrap();
    has_ended.store(true, Ordering::Release);
    assert_eq!(viewer.read(&mut [0; 1]).unwrap(), 0);
    serving.join().unwrap().unwrap();
}
