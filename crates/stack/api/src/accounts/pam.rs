//! Passwords of the system's accounts, checked by PAM.
//!
//! The library is opened when the daemon starts, so that a host without it needs nothing. Linux-PAM's own interface
//! (`security/pam_appl.h`) is stable since its beginning.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use parking_lot::Mutex;
use zeroize::Zeroizing;

const SUCCESS: c_int = 0;
const BUFFER_ERROR: c_int = 5;
const CONVERSATION_ERROR: c_int = 19;
const NEW_PASSWORD_REQUIRED: c_int = 12;
const ACCOUNT_EXPIRED: c_int = 13;
const PROMPT_SILENT: c_int = 1;
const PROMPT_SHOWN: c_int = 2;
const ERROR_TEXT: c_int = 3;
const INFO_TEXT: c_int = 4;
const ITEM_REMOTE_HOST: c_int = 4;
const ITEM_FAIL_DELAY: c_int = 10;
const SILENT: c_int = 0x8000;
const NO_EMPTY_PASSWORD: c_int = 1;
/// Prompts of one conversation.
const PROMPTS_MAX: usize = 32;

/// Longest name and password that are shown to it.
const TEXT_MAX: usize = 1024;

#[repr(C)]
struct Message {
    style: c_int,
    text: *const c_char,
}

#[repr(C)]
struct Response {
    text: *mut c_char,
    code: c_int,
}

type Converse = unsafe extern "C" fn(c_int, *const *const Message, *mut *mut Response, *mut c_void) -> c_int;

#[repr(C)]
struct Conversation {
    converse: Converse,
    data: *mut c_void,
}

type Handle = *mut c_void;
type Start = unsafe extern "C" fn(*const c_char, *const c_char, *const Conversation, *mut Handle) -> c_int;
type StartIn = unsafe extern "C" fn(
    *const c_char,
    *const c_char,
    *const Conversation,
    *const c_char,
    *mut Handle,
) -> c_int;
type Step = unsafe extern "C" fn(Handle, c_int) -> c_int;
type SetItem = unsafe extern "C" fn(Handle, c_int, *const c_void) -> c_int;
type Describe = unsafe extern "C" fn(Handle, c_int) -> *const c_char;

/// Which rules PAM goes by.
#[derive(Clone, Debug, Default)]
pub struct PamOptions {
    /// Name of the service; none: `tapio` where the system has rules for it, otherwise those of `login`, otherwise
    /// `common-auth`.
    pub service: Option<String>,
    /// Directory of the rules, where it is not `/etc/pam.d`.
    pub dir: Option<PathBuf>,
}

/// The library.
#[derive(Debug)]
pub struct Pam {
    start: Start,
    start_in: Option<(StartIn, CString)>,
    authenticate: Step,
    account: Step,
    set_item: SetItem,
    end: Step,
    describe: Option<Describe>,
    service: CString,
    /// Modules are of many hands; one at a time.
    turn: Mutex<()>,
}

/// What a prompt is answered with.
struct Answers {
    user: Zeroizing<Vec<u8>>,
    password: Zeroizing<Vec<u8>>,
}

fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: the library is open and stays so; the name is terminated.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    if found.is_null() { Err(format!("libpam.so.0 has no {}", name.to_string_lossy())) } else { Ok(found) }
}

impl Pam {
    /// Opens the library.
    ///
    /// # Errors
    /// A sentence: it is not installed, or has no rules for any of the services.
    pub fn open(options: &PamOptions) -> Result<Self, String> {
        let dir = options.dir.clone().unwrap_or_else(|| PathBuf::from("/etc/pam.d"));
        let service = match &options.service {
            Some(service) => service.clone(),
            None => ["tapio", "login", "common-auth"]
                .into_iter()
                .find(|name| dir.join(name).exists())
                .ok_or_else(|| format!("{} has rules for none of tapio, login, common-auth", dir.display()))?
                .to_owned(),
        };
        let service = CString::new(service).map_err(|_| "the service's name has a zero byte".to_owned())?;
        // SAFETY: a terminated name; constructors of the library do nothing but set it up.
        let library = unsafe { libc::dlopen(c"libpam.so.0".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return Err("libpam.so.0 is not installed".to_owned());
        }
        let start_in = match &options.dir {
            None => None,
            Some(dir) => {
                let found = symbol(library, c"pam_start_confdir")?;
                // SAFETY: Linux-PAM 1.4 declares it with this signature.
                Some((unsafe { std::mem::transmute::<*mut c_void, StartIn>(found) }, path_text(dir)?))
            }
        };
        let step = |name| {
            let found = symbol(library, name)?;
            // SAFETY: the functions that are asked for take a handle and an int, and give an int.
            Ok::<_, String>(unsafe { std::mem::transmute::<*mut c_void, Step>(found) })
        };
        let (start, set_item) = (symbol(library, c"pam_start")?, symbol(library, c"pam_set_item")?);
        let describe = symbol(library, c"pam_strerror").ok();
        Ok(Self {
            // SAFETY: security/pam_appl.h declares it with this signature.
            start: unsafe { std::mem::transmute::<*mut c_void, Start>(start) },
            start_in,
            authenticate: step(c"pam_authenticate")?,
            account: step(c"pam_acct_mgmt")?,
            // SAFETY: security/_pam_types.h declares it with this signature.
            set_item: unsafe { std::mem::transmute::<*mut c_void, SetItem>(set_item) },
            end: step(c"pam_end")?,
            // SAFETY: security/_pam_types.h declares it with this signature.
            describe: describe.map(|found| unsafe { std::mem::transmute::<*mut c_void, Describe>(found) }),
            service,
            turn: Mutex::new(()),
        })
    }

    /// Checks a password, and that the account may be used now.
    ///
    /// # Errors
    /// A sentence without either of them.
    pub fn authenticate(&self, user: &str, password: &str, from: &str) -> Result<(), String> {
        const WRONG: &str = "the name or the password is wrong";
        let text = |text: &str| {
            let mut bytes = Zeroizing::new(Vec::with_capacity(text.len() + 1));
            bytes.extend_from_slice(text.as_bytes());
            bytes.push(0);
            bytes
        };
        let unfit = |text: &str| text.len() > TEXT_MAX || text.contains('\0');
        if unfit(user) || unfit(password) || unfit(from) || user.is_empty() {
            return Err(WRONG.to_owned());
        }
        let answers = Answers { user: text(user), password: text(password) };
        let from = text(from);
        let conversation = Conversation { converse, data: (&raw const answers).cast_mut().cast() };
        let _turn = self.turn.lock();
        let mut handle: Handle = ptr::null_mut();
        let name = answers.user.as_ptr().cast();
        let started = match &self.start_in {
            // SAFETY: texts are terminated, and they and the conversation live longer than the handle.
            Some((start, dir)) => unsafe {
                start(self.service.as_ptr(), name, &raw const conversation, dir.as_ptr(), &raw mut handle)
            },
            // SAFETY: as above.
            None => unsafe {
                (self.start)(self.service.as_ptr(), name, &raw const conversation, &raw mut handle)
            },
        };
        if started != SUCCESS || handle.is_null() {
            return Err(format!("PAM does not start: error {started}"));
        }
        let mut status;
        let mut account_asked = false;
        // SAFETY: the handle was started and is ended once, below; what it points to is alive. The delay is a function
        // of the type that PAM documents for this item.
        unsafe {
            (self.set_item)(handle, ITEM_REMOTE_HOST, from.as_ptr().cast());
            // After a wrong password the client waits in the server, without a thread.
            (self.set_item)(handle, ITEM_FAIL_DELAY, no_delay as *const c_void);
            status = (self.authenticate)(handle, SILENT | NO_EMPTY_PASSWORD);
            if status == SUCCESS {
                account_asked = true;
                status = (self.account)(handle, SILENT | NO_EMPTY_PASSWORD);
            }
        }
        let said = self.described(handle, status);
        // SAFETY: the handle of above, for the last time.
        unsafe { (self.end)(handle, status) };
        match status {
            SUCCESS => Ok(()),
            NEW_PASSWORD_REQUIRED => Err("the password has expired: change it with passwd".to_owned()),
            ACCOUNT_EXPIRED => Err("the account has expired".to_owned()),
            _ if account_asked => Err(format!("the account may not be used now: {said}")),
            _ => {
                tracing::debug!("PAM refuses: {said}");
                Err(WRONG.to_owned())
            }
        }
    }

    fn described(&self, handle: Handle, status: c_int) -> String {
        let Some(describe) = self.describe else { return format!("error {status}") };
        // SAFETY: the handle is still open; the answer is null or a text of the library's own.
        let text = unsafe { describe(handle, status) };
        if text.is_null() {
            return format!("error {status}");
        }
        // SAFETY: not null, so it is a terminated text that lives as long as the library.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

fn path_text(path: &Path) -> Result<CString, String> {
    use std::os::unix::ffi::OsStrExt;
    CString::new(path.as_os_str().as_bytes()).map_err(|_| format!("{}: has a zero byte", path.display()))
}

unsafe extern "C" fn no_delay(_status: c_int, _micros: c_uint, _data: *mut c_void) {}

/// Answers prompts: silent ones with the password, others with the name. The library frees what it is given.
unsafe extern "C" fn converse(
    count: c_int,
    messages: *const *const Message,
    responses: *mut *mut Response,
    data: *mut c_void,
) -> c_int {
    let Ok(count) = usize::try_from(count) else { return CONVERSATION_ERROR };
    if count == 0 || count > PROMPTS_MAX || messages.is_null() || responses.is_null() || data.is_null() {
        return CONVERSATION_ERROR;
    }
    // SAFETY: it is the data that the conversation was started with, which outlives it.
    let answers = unsafe { &*data.cast::<Answers>() };
    // SAFETY: calloc takes two numbers; the answer is checked.
    let made = unsafe { libc::calloc(count, size_of::<Response>()) }.cast::<Response>();
    if made.is_null() {
        return BUFFER_ERROR;
    }
    let mut status = SUCCESS;
    for at in 0..count {
        // SAFETY: Linux-PAM hands over an array of `count` pointers to messages.
        let style = unsafe { (**messages.add(at)).style };
        let text = match style {
            PROMPT_SILENT => Some(&answers.password),
            PROMPT_SHOWN => Some(&answers.user),
            ERROR_TEXT | INFO_TEXT => None,
            _ => {
                status = CONVERSATION_ERROR;
                break;
            }
        };
        if let Some(text) = text {
            // SAFETY: the text is terminated.
            let copy = unsafe { libc::strdup(text.as_ptr().cast()) };
            if copy.is_null() {
                status = BUFFER_ERROR;
                break;
            }
            // SAFETY: one of the `count` responses that were made.
            unsafe { (*made.add(at)).text = copy };
        }
    }
    if status == SUCCESS {
        // SAFETY: where the library wants it; from now on it is the library's.
        unsafe { *responses = made };
        return SUCCESS;
    }
    for at in 0..count {
        // SAFETY: made above; a response without a text is null, which free takes. A password in it is cleared first.
        unsafe {
            let text = (*made.add(at)).text;
            if !text.is_null() {
                libc::explicit_bzero(text.cast(), libc::strlen(text));
            }
            libc::free(text.cast());
        }
    }
    // SAFETY: made above, and nothing else holds it.
    unsafe { libc::free(made.cast()) };
    status
}

/// Number of an account; none where the system does not know it.
pub(super) fn uid_of(user: &str) -> Option<(libc::uid_t, libc::gid_t)> {
    let name = CString::new(user).ok()?;
    let mut buffer = vec![0_u8; 16 << 10];
    // SAFETY: a struct of numbers and pointers, for which all zeroes is a value.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = ptr::null_mut();
    // SAFETY: everything that is written to is as large as it is said to be.
    let result = unsafe {
        libc::getpwnam_r(
            name.as_ptr(),
            &raw mut entry,
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            &raw mut found,
        )
    };
    (result == 0 && !found.is_null()).then_some((entry.pw_uid, entry.pw_gid))
}

/// Numbers of the groups of an account; none where the system does not know it.
pub(super) fn groups_of(user: &str) -> Vec<libc::gid_t> {
    let Some((_, own)) = uid_of(user) else { return Vec::new() };
    let Ok(name) = CString::new(user) else { return Vec::new() };
    let mut groups = vec![0; 256];
    let mut count = c_int::try_from(groups.len()).unwrap_or(c_int::MAX);
    // SAFETY: at most `count` groups are written.
    let told = unsafe { libc::getgrouplist(name.as_ptr(), own, groups.as_mut_ptr(), &raw mut count) };
    if told < 0 {
        tracing::warn!("{user} is in more than {} groups: those beyond are not looked at", groups.len());
    }
    groups.truncate(usize::try_from(count).unwrap_or(0));
    groups
}

/// Number of a group; none where the system does not know it.
pub(super) fn gid_of(group: &str) -> Option<libc::gid_t> {
    let name = CString::new(group).ok()?;
    let mut buffer = vec![0_u8; 64 << 10];
    // SAFETY: a struct of numbers and pointers, for which all zeroes is a value.
    let mut entry: libc::group = unsafe { std::mem::zeroed() };
    let mut found = ptr::null_mut();
    // SAFETY: everything that is written to is as large as it is said to be.
    let result = unsafe {
        libc::getgrnam_r(
            name.as_ptr(),
            &raw mut entry,
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            &raw mut found,
        )
    };
    (result == 0 && !found.is_null()).then_some(entry.gr_gid)
}
