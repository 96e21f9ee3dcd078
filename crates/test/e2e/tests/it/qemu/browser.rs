//! The screen of a guest in a browser.

use std::time::Duration;

use tapio_e2e::disk::text;
use tapio_e2e::guest::Qemu;
use tapio_e2e::needs;
use tapio_e2e::process::run_within;
use tapio_e2e::world::World;

use crate::browser;

/// A first sector that is a guest: it shows what is typed on its screen and sends it to its serial port, and a digit,
/// 0 to 7, for the buttons of the pointer whenever that moves. At '!' the screen becomes red, in 320 by 200 points.
const SECTOR: [u8; 128] = [
    // xor ax,ax; mov ds,ax; mov es,ax; mov ss,ax; mov sp,0x7c00; mov si,TEXT
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0xbe, 0x74, 0x7c,
    // next: lodsb; or al,al; jz done; mov ah,0x0e; xor bx,bx; int 0x10; jmp next
    0xac, 0x08, 0xc0, 0x74, 0x08, 0xb4, 0x0e, 0x31, 0xdb, 0xcd, 0x10, 0xeb, 0xf3,
    // done: mov ax,0xc205; mov bh,3; int 0x15; mov ax,0xc207; mov bx,POINTER; int 0x15; mov ax,0xc200; mov bh,1;
    // int 0x15
    0xb8, 0x05, 0xc2, 0xb7, 0x03, 0xcd, 0x15, 0xb8, 0x07, 0xc2, 0xbb, 0x60, 0x7c, 0xcd, 0x15, 0xb8, 0x00,
    0xc2, 0xb7, 0x01, 0xcd, 0x15,
    // key: mov ah,0; int 0x16; cmp al,'!'; je red; push ax; mov ah,0x0e; xor bx,bx; int 0x10; pop ax; mov dx,0x3f8;
    // out dx,al; jmp key
    0xb4, 0x00, 0xcd, 0x16, 0x3c, 0x21, 0x74, 0x0e, 0x50, 0xb4, 0x0e, 0x31, 0xdb, 0xcd, 0x10, 0x58, 0xba,
    0xf8, 0x03, 0xee, 0xeb, 0xea,
    // red: mov ax,0x13; int 0x10; mov ax,0xa000; mov es,ax; xor di,di; mov cx,64000; mov al,4; rep stosb; xor ax,ax;
    // mov es,ax; jmp key
    0xb8, 0x13, 0x00, 0xcd, 0x10, 0xb8, 0x00, 0xa0, 0x8e, 0xc0, 0x31, 0xff, 0xb9, 0x00, 0xfa, 0xb0, 0x04,
    0xf3, 0xaa, 0x31, 0xc0, 0x8e, 0xc0, 0xeb, 0xd1,
    // POINTER: push bp; mov bp,sp; push ax; push dx; mov al,[bp+12]; and al,7; or al,'0'; mov dx,0x3f8; out dx,al;
    // pop dx; pop ax; pop bp; retf
    0x55, 0x89, 0xe5, 0x50, 0x52, 0x8a, 0x46, 0x0c, 0x24, 0x07, 0x0c, 0x30, 0xba, 0xf8, 0x03, 0xee, 0x5a,
    0x58, 0x5d, 0xcb, // TEXT: "Type here> "
    0x54, 0x79, 0x70, 0x65, 0x20, 0x68, 0x65, 0x72, 0x65, 0x3e, 0x20, 0x00,
];

#[test]
fn a_person_uses_a_screen() {
    needs!(Qemu::TOOLS[0], "chromium", "chromedriver");
    let world = World::with(|options| options.arg("--set").arg("log-level=debug"));
    let xe = |words: &[&str]| {
        run_within(world.xe().args(words), Duration::from_secs(120)).ok().trim_end().to_owned()
    };
    let vm = xe(&["vm-install", "template=Other install media", "new-name-label=guest"]);
    xe(&["vm-param-set", &format!("uuid={vm}"), "platform:accel=tcg", "platform:vnc=true"]);
    let disk = xe(&["vbd-list", "vm-name-label=guest", "type=Disk", "params=vdi-uuid", "--minimal"]);
    let image = world.scratch.join("image.raw");
    let mut bytes = SECTOR.to_vec();
    bytes.resize(510, 0);
    bytes.extend([0x55, 0xaa]);
    bytes.resize(1 << 20, 0);
    std::fs::write(&image, bytes).expect("an image");
    let file = format!("filename={}", text(&image));
    xe(&["vdi-import", &format!("uuid={disk}"), &file, "format=raw"]);
    xe(&["vm-start", "vm=guest"]);
    browser::story(&world, "screen");
    xe(&["vm-shutdown", "vm=guest", "--force"]);
    world.finish();
}
