//! Archives of a VM with a disk, in each form.

use std::io::Write;

use tapio_xva::{Compression, Compressor, Document, Writer};

use super::Shelf;

const DOCUMENT: &str = "<?xml version='1.0'?><value><struct><member><name>version</name><value><struct>\
    <member><name>export_vsn</name><value><int>2</int></value></member></struct></value></member>\
    <member><name>objects</name><value><array><data>\
    <value><struct><member><name>class</name><value>VM</value></member>\
    <member><name>id</name><value>Ref:0</value></member>\
    <member><name>snapshot</name><value><struct>\
    <member><name>name_label</name><value>a &lt;b&gt; &#65;</value></member>\
    <member><name>is_a_template</name><value><boolean>1</boolean></value></member>\
    <member><name>tags</name><value><array><data><value/></data></array></value></member>\
    <member><name>x</name><value><nil/></value></member></struct></value></member></struct></value>\
    </data></array></value></member></struct></value>";

pub(super) fn put_into(shelf: &mut Shelf) {
    shelf.put("xva_document", "document", DOCUMENT);
    shelf.put("xva_document", "entity", "<!DOCTYPE a [<!ENTITY b 'c'>]><value>&b;</value>");
    shelf.put("xva_document", "deep", "<value><array><data>".repeat(40));
    let Ok(document) = Document::read(DOCUMENT.as_bytes()) else { return };
    for (name, compression) in
        [("plain", Compression::None), ("gzip", Compression::Gzip), ("zstd", Compression::Zstd)]
    {
        let bytes = archive(&document, compression).unwrap_or_default();
        shelf.put("xva", name, bytes);
    }
}

fn archive(document: &Document, compression: Compression) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut plain = Writer::new(Vec::new(), document)?;
    for (number, len) in [(0, 1024), (3, 1024), (4, 0), (7, 700)] {
        plain.chunk("Ref:7", number, &vec![number as u8 + 1; len])?;
    }
    plain.chunk("Ref:8", 0, &[])?;
    let mut compressor = Compressor::new(compression, &mut bytes);
    compressor.write_all(&plain.finish()?)?;
    compressor.finish()?;
    Ok(bytes)
}
