//! What an idle process gives back to the host.

use std::ffi::{c_int, c_void};
use std::ptr;

const PAGE_LEN: usize = 4096;

/// Gives back freed memory, and lets go of the pages of programs and libraries, which an idle disk shall not count as
/// its own. What is needed again comes back from the page cache as it is touched, which makes the first request after
/// a rest a little slower.
pub fn give_back() {
    tapio_sys::memory::give_back();
    // SAFETY: the function takes what the linker calls it with, and keeps none of it.
    unsafe { libc::dl_iterate_phdr(Some(forget), ptr::null_mut()) };
}

/// Lets go of what a loaded object maps from its file and never writes.
unsafe extern "C" fn forget(object: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> c_int {
    // SAFETY: the linker calls this with an object that stays loaded meanwhile, and with all its headers.
    let (object, headers) = unsafe {
        let object = &*object;
        (object, std::slice::from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum)))
    };
    // What the kernel maps into every process is no file, and its name no path.
    // SAFETY: the linker gives each object a name that ends with a zero, the program itself an empty one.
    let first = unsafe { *object.dlpi_name } as u8;
    if !matches!(first, 0 | b'/') || is_changed_by_the_linker(object, headers) {
        return 0;
    }
    for header in headers.iter().filter(|header| is_only_read(header)) {
        let begin = (object.dlpi_addr + header.p_vaddr) as usize;
        let (start, end) = (begin & !(PAGE_LEN - 1), (begin + header.p_filesz as usize) & !(PAGE_LEN - 1));
        // SAFETY: these pages are mapped from the object's file and never written, so each reads the same when it
        // comes back. A page at the end that another segment may share is left alone.
        unsafe {
            libc::madvise(ptr::without_provenance_mut(start), end.saturating_sub(start), libc::MADV_DONTNEED);
        }
    }
    0
}

fn is_only_read(header: &libc::Elf64_Phdr) -> bool {
    header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0
}

/// Whether the linker has written addresses into what is otherwise only read (`DT_TEXTREL`, or its flag in
/// `DT_FLAGS`): those pages are not what the file has.
fn is_changed_by_the_linker(object: &libc::dl_phdr_info, headers: &[libc::Elf64_Phdr]) -> bool {
    const DT_NULL: u64 = 0;
    const DT_TEXTREL: u64 = 22;
    const DT_FLAGS: u64 = 30;
    const DF_TEXTREL: u64 = 4;
    let Some(header) = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC) else { return false };
    let address = (object.dlpi_addr + header.p_vaddr) as usize;
    let count = header.p_memsz as usize / size_of::<[u64; 2]>();
    // SAFETY: the object's dynamic section lies there for as long as it is loaded: pairs of a tag and a value.
    let entries = unsafe { std::slice::from_raw_parts(ptr::without_provenance::<[u64; 2]>(address), count) };
    entries
        .iter()
        .take_while(|[tag, _]| *tag != DT_NULL)
        .any(|[tag, value]| *tag == DT_TEXTREL || *tag == DT_FLAGS && value & DF_TEXTREL != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kilobytes of the program's code in memory.
    fn code_kib() -> u64 {
        let program = std::env::current_exe().expect("its path");
        let text = std::fs::read_to_string("/proc/self/smaps").expect("our maps");
        let mut lines = text.lines();
        let mut sum = 0;
        while let Some(line) = lines.next() {
            if line.contains("r-xp") && line.ends_with(program.to_str().expect("plain")) {
                let rss = lines.find_map(|line| line.strip_prefix("Rss:")).expect("a size");
                sum += rss.trim().trim_end_matches(" kB").parse::<u64>().expect("a number");
            }
        }
        sum
    }

    #[test]
    fn most_of_the_code_goes_and_comes_back() {
        let before = code_kib();
        give_back();
        let after = code_kib();
        assert!(after < before, "{after} KiB of {before}");
        // What is running now has come back.
        assert!(after > 0);
    }
}
