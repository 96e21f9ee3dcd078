//! What lies in an SR's directory.

use super::{Shelf, dynamic_image};

pub fn put_into(shelf: &mut Shelf) {
    let [base, new] = ["9d1e1f0c-6a4c-4f4e-8a8e-3a7f0a4d1c2b", "0f2f9a52-54a1-4b6e-9d47-9c3b1f6d7e10"];
    shelf.put("sm_journal", "pair", format!("{base}_{new}\n"));
    shelf.put("sm_journal", "single", format!("{base}\n"));
    shelf.put("sm_journal", "cut", format!("{base}_{}", &new[..20]));
    shelf.put(
        "sm_journal",
        "blkid",
        "DEVNAME=/dev/loop0\nLABEL=tapio-sr\nUUID=1\nTYPE=ext4\nUSAGE=filesystem\n",
    );
    shelf.put("sm_image", "dynamic", dynamic_image());
    shelf.put("sm_image", "empty", "");
}
