//! Pages of disks, and answers of targets.

use super::Shelf;

pub fn put_into(shelf: &mut Shelf) {
    let page = |number: u8, body: &[u8]| {
        let mut page = vec![0, number, 0, u8::try_from(body.len()).unwrap_or(0)];
        page.extend_from_slice(body);
        page
    };
    let pages = |designators: &[u8], serial: &[u8]| {
        let designators = page(0x83, designators);
        let mut bytes = vec![u8::try_from(designators.len()).unwrap_or(0)];
        bytes.extend(designators);
        bytes.extend(page(0x80, serial));
        bytes
    };
    let naa = [&[1, 3, 0, 16, 0x60, 1, 0x40, 0x5a][..], &[7; 12]].concat();
    let port = [&[1, 0x13, 0, 8][..], &[0x50; 8]].concat();
    let vendor = [&[2, 1, 0, 11][..], b"LIO-ORG d:1"].concat();
    let own = [&[2, 0, 0, 3][..], b"abc"].concat();
    shelf.put(
        "scsi_pages",
        "naa",
        pages(&[vendor.clone(), port.clone(), naa.clone()].concat(), b"ACME disk"),
    );
    shelf.put("scsi_pages", "vendor", pages(&[vendor, port].concat(), b"ACME disk"));
    shelf.put("scsi_pages", "own", pages(&own, b"SN 12 34 ACME disk"));
    shelf.put("scsi_pages", "serial", pages(&[], b"SN 12 34\0 ACME disk"));
    shelf.put("scsi_pages", "cut", pages(&naa[..9], b""));
    shelf.put(
        "iscsi_discovery",
        "two",
        "10.0.0.1:3260,1 iqn.2001-04.com.example:a\n[fd00::1]:860,2 iqn.2001-04.com.example:b\n",
    );
    shelf.put(
        "iscsi_discovery",
        "odd",
        "10.0.0.1:3260,-1 eui.02004567A425678D\n10.0.0.1:0,1 ../x\nnonsense\n",
    );
}
