//! `tapio profile` on files of this host, and on exports of a server that is slow on purpose.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tapio_e2e::disk::{DiskOptions, Host, tapio, text};
use tapio_e2e::local::{device_of, lacks_fuse};
use tapio_e2e::needs;
use tapio_e2e::process::{Running, run};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;

use super::MIB;

fn finding<'a>(report: &'a Value, kind: &str) -> &'a Value {
    let all = report["findings"].as_array().expect("findings");
    all.iter().find(|one| one["kind"] == kind).unwrap_or_else(|| panic!("no {kind} in {report:#}"))
}

/// The pixels of a picture, as rows of red, green, blue and alpha, drawn with a border of 60 pixels around it that the
/// picture does not own.
fn rendered(scratch: &Scratch, svg: &Path) -> (usize, Vec<u8>) {
    const BORDER: usize = 60;
    let drawn = fs::read_to_string(svg).expect("a picture");
    let number = |name: &str| -> usize {
        let after = drawn.split_once(&format!(" {name}=\"")).expect("a size").1;
        after.split_once('"').expect("quoted").0.parse().expect("a number")
    };
    let (width, height) = (number("width"), number("height"));
    let (all, high) = (width + 2 * BORDER, height + 2 * BORDER);
    let frame = format!("width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\"");
    assert!(drawn.contains(&frame), "{}", svg.display());
    let wider = format!("width=\"{all}\" height=\"{high}\" viewBox=\"-{BORDER} -{BORDER} {all} {high}\"");
    let (framed, png) = (scratch.join("framed.svg"), scratch.join("picture.png"));
    fs::write(&framed, drawn.replacen(&frame, &wider, 1)).expect("written");
    run(Command::new("rsvg-convert").arg(&framed).arg("-o").arg(&png)).ok();
    let script = "import sys,zlib,struct\n\
        d=open(sys.argv[1],'rb').read();p=8;z=b''\n\
        while p<len(d):\n n,t=struct.unpack('>I4s',d[p:p+8]);b=d[p+8:p+8+n];p+=12+n\n\
        \x20if t==b'IHDR': w,h,dep,col=struct.unpack('>IIBB',b[:10]); assert (dep,col)==(8,6)\n\
        \x20if t==b'IDAT': z+=b\n\
        r=zlib.decompress(z);s=w*4;o=bytearray();q=bytearray(s)\n\
        for y in range(h):\n f=r[y*(s+1)];l=bytearray(r[y*(s+1)+1:(y+1)*(s+1)])\n\
        \x20for i in range(s):\n  a=l[i-4] if i>3 else 0;b=q[i];c=q[i-4] if i>3 else 0\n\
        \x20 if f==1: v=a\n  elif f==2: v=b\n  elif f==3: v=(a+b)//2\n\
        \x20 elif f==4:\n   e=a+b-c;x,y2,g=abs(e-a),abs(e-b),abs(e-c);v=a if x<=y2 and x<=g else b if y2<=g else c\n\
        \x20 else: v=0\n  l[i]=(l[i]+v)&255\n o+=l;q=l\n\
        open(sys.argv[2],'wb').write(bytes(o))\n";
    let raw = scratch.join("picture.raw");
    run(Command::new("python3").args(["-c", script, text(&png), text(&raw)])).ok();
    let pixels = fs::read(&raw).expect("pixels");
    assert_eq!(pixels.len(), all * high * 4, "{}", svg.display());
    (all, pixels)
}

/// Not blank, nothing outside of the picture, and ink of at least `colours` colours in it.
fn assert_drawn(scratch: &Scratch, svg: &Path, colours: usize) -> (usize, Vec<u8>) {
    let (width, pixels) = rendered(scratch, svg);
    let height = pixels.len() / 4 / width;
    let mut seen = std::collections::BTreeMap::new();
    for (index, pixel) in pixels.chunks_exact(4).enumerate() {
        let (x, y) = (index % width, index / width);
        let inside = (60..width - 60).contains(&x) && (60..height - 60).contains(&y);
        assert!(inside || pixel[3] == 0, "{}: ink at {x} {y}, outside of the picture", svg.display());
        if inside && pixel[..3] != [255, 255, 255] {
            *seen.entry([pixel[0], pixel[1], pixel[2]]).or_insert(0) += 1;
        }
    }
    let many = seen.values().filter(|count| **count > 20).count();
    assert!(many >= colours, "{}: {many} colours in {seen:?}", svg.display());
    (width, pixels)
}

#[test]
fn a_file_is_profiled_and_its_pictures_can_be_seen() {
    needs!("rsvg-convert", "python3");
    let scratch = Scratch::on_disk();
    let image = scratch.join("a & b.raw");
    fs::write(&image, vec![3; 16 << 20]).expect("an image");
    let out = |name: &str| scratch.join(name);
    let mut command =
        tapio(&["profile", text(&image), "--quick", "--seconds", "2", "--points", "16", "--reads", "1"]);
    command.args([
        "--depth-max",
        "64",
        "--json",
        "--svg",
        text(&out("pictures")),
        "--html",
        text(&out("page.html")),
    ]);
    command.args(["--dat", text(&out("a.dat")), "--write-settings", text(&out("settings"))]);
    let report: Value = serde_json::from_str(&run(&mut command).ok()).expect("JSON");
    assert_eq!(report["len"], 16 * MIB);
    assert_eq!(report["scan"]["points"].as_array().map(Vec::len), Some(16), "{report:#}");
    let samples: usize = report["sweeps"]
        .as_array()
        .expect("sweeps")
        .iter()
        .map(|sweep| sweep["samples"].as_array().map_or(0, Vec::len))
        .sum();
    assert!(samples > 4, "{report:#}");
    assert!(report["costs"]["write_us"].is_null(), "nothing is written unasked");
    assert!(fs::read(&image).expect("the image").iter().all(|byte| *byte == 3));
    let dat = fs::read_to_string(out("a.dat")).expect("lines");
    for line in dat.lines() {
        let numbers: Vec<u64> = line.split(' ').map(|word| word.parse().expect("a number")).collect();
        assert!(numbers.len() == 4 && numbers[0] == numbers[1] * numbers[2], "{line}");
    }
    let page = fs::read_to_string(out("page.html")).expect("a page");
    assert!(page.contains("a &amp; b.raw") && page.contains("<svg") && page.contains("</html>"));
    assert!(
        !page.contains("http://") || page.matches("http://").count() == page.matches("xmlns=").count(),
        "self-contained"
    );
    // The line of the mean, in its colour; cells of several shades; a dot for each point.
    assert_drawn(&scratch, &out("pictures/address.svg"), 3);
    assert_drawn(&scratch, &out("pictures/heat-random-reads.svg"), 4);
    let dots = out("pictures/in-flight-random-reads.svg");
    let (width, pixels) = assert_drawn(&scratch, &dots, 2);
    let drawn = fs::read_to_string(&dots).expect("a picture");
    let mut count = 0;
    for dot in drawn.lines().filter(|line| line.starts_with("<circle")) {
        let value = |name: &str| {
            dot.split_once(&format!("{name}=\"")).expect("there").1.split_once('"').expect("quoted").0
        };
        let place = |name: &str| value(name).parse::<f64>().expect("a number").round() as usize + 60;
        let at = (place("cy") * width + place("cx")) * 4;
        // Another dot may lie upon it, in its own colour: it is never the paper.
        assert_ne!(pixels[at..at + 3], [255, 255, 255], "no dot at {dot}");
        count += 1;
    }
    assert_eq!(count, dat.lines().count(), "a dot for each line of the table");
    let again = run(&mut tapio(&["profile", text(scratch.path())])).fails();
    assert!(again.contains("neither a file nor a block device"), "{again}");
}

/// A disk on an export of nbdkit, as a file of this host.
fn exported(
    scratch: &Scratch,
    host: &Host,
    name: &str,
    filters: &[&str],
) -> (Running, tapio_e2e::disk::Disk) {
    let socket = scratch.join(&format!("{name}.sock"));
    let mut nbdkit = Command::new("nbdkit");
    nbdkit.args(["-f", "-t", "64", "-U", text(&socket)]).args(filters);
    let mut server = Running::start(&mut nbdkit, &scratch.join(&format!("{name}.log")));
    server.wait_for("the socket of nbdkit", Duration::from_secs(20), || socket.exists().then_some(()));
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let disk = DiskOptions::remote(&uri).arg("--device").arg("fuse-file").start_on(host, scratch.path());
    (server, disk)
}

fn of_disk(host: &Host, options: &[&str]) -> Value {
    let path = device_of(host);
    let mut command = host.tapio(&["profile", text(&path), "--quick", "--json", "--only", "sweep"]);
    serde_json::from_str(&run(command.args(options)).ok()).expect("JSON")
}

#[test]
fn a_delay_is_found_as_large_as_it_is() {
    needs!("nbdkit");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    if let Some(why) = lacks_fuse(&host) {
        return skip(&why);
    }
    let late = ["--filter=delay", "memory", "64M", "rdelay=100ms"];
    let (server, disk) = exported(&scratch, &host, "late", &late);
    let report = of_disk(&host, &["--seconds", "4", "--depth-max", "16"]);
    let ms = finding(&report, "delay")["ms"].as_f64().expect("milliseconds");
    // A busy host adds to a delay, and takes nothing away.
    assert!((99.0..110.0).contains(&ms), "{report:#}");
    disk.stop();
    drop(server);
}
