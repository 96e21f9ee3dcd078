//! Tap interfaces of this host: the other ends of guests' network interfaces.
//!
//! An interface lives as long as a descriptor of it is open (it is not persistent), so it ends with the emulator that
//! was given it, however that ends. The bridge is the host's: it is made and removed by others.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Longest name of an interface (`IFNAMSIZ` without its end).
const NAME_LEN_MAX: usize = 15;

/// Least bytes of a frame that Ethernet carries (`ETH_MIN_MTU`).
pub(crate) const MTU_MIN: u16 = 68;

/// `linux/sockios.h`
const SIOCBRADDIF: libc::c_ulong = 0x89a2;
/// The same.
const SIOCBRDELIF: libc::c_ulong = 0x89a3;
/// `linux/ethtool.h`
const ETHTOOL_GDRVINFO: u32 = 3;

/// The address of the host's end. A bridge takes the lowest address of its ports as its own: never this one.
const HOST_END: [u8; 6] = [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff];

/// What there is under the name of a bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BridgeState {
    /// A bridge of Linux.
    There,
    /// Nothing.
    Missing,
    /// An interface that is no bridge of Linux: its driver.
    Other(String),
}

/// A step that did not work.
#[derive(Debug)]
pub(crate) struct TapError {
    step: &'static str,
    error: io::Error,
}

impl fmt::Display for TapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let next = match self.error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => "; tapiod needs CAP_NET_ADMIN for that: run it as root",
            Some(libc::ENOENT | libc::ENXIO) => "; load the kernel's driver: modprobe tun",
            Some(libc::ENODEV) => "; the bridge went away meanwhile: make it again",
            _ => "",
        };
        write!(f, "{}: {}{next}", self.step, self.error)
    }
}

/// `struct ifreq`: a name and 24 bytes whose meaning the request gives.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Request {
    name: [u8; NAME_LEN_MAX + 1],
    data: [u8; 24],
}

impl Request {
    fn of(name: &str) -> io::Result<Self> {
        if name.is_empty() || name.len() > NAME_LEN_MAX || name.contains(['/', '\0']) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} names no interface")));
        }
        let mut bytes = [0; NAME_LEN_MAX + 1];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        Ok(Self { name: bytes, data: [0; 24] })
    }

    fn with(mut self, data: &[u8]) -> Self {
        self.data[..data.len()].copy_from_slice(data);
        self
    }

    fn int(&self) -> i32 {
        i32::from_ne_bytes([self.data[0], self.data[1], self.data[2], self.data[3]])
    }

    fn name(&self) -> String {
        let end = self.name.iter().position(|byte| *byte == 0).unwrap_or(NAME_LEN_MAX);
        String::from_utf8_lossy(&self.name[..end]).into_owned()
    }

    /// Makes a request whose data are numbers or an address, in place.
    fn ask(&mut self, fd: RawFd, number: libc::c_ulong) -> io::Result<()> {
        // SAFETY: every request that is made here reads and writes one `ifreq`, which `self` is, and follows no
        // pointer in it.
        let answer = unsafe { libc::ioctl(fd, number, std::ptr::from_mut(self)) };
        if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// A socket that requests about interfaces are made with, in the network namespace of this thread.
fn socket() -> io::Result<OwnedFd> {
    let (family, kind, flags) = (AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC);
    Ok(socket_with(family, kind, flags, None)?)
}

/// The name of an interface's driver.
fn driver(socket: &OwnedFd, name: &str) -> io::Result<String> {
    /// `struct ethtool_drvinfo`
    #[repr(C)]
    struct Info {
        command: u32,
        driver: [u8; 32],
        rest: [u8; 160],
    }
    let mut info = Info { command: ETHTOOL_GDRVINFO, driver: [0; 32], rest: [0; 160] };
    let mut request = Request::of(name)?.with(&(std::ptr::from_mut(&mut info) as usize).to_ne_bytes());
    // SAFETY: the request's data are the address of `info`, which is as long as the kernel's structure and lives
    // beyond the call.
    let answer =
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, std::ptr::from_mut(&mut request)) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    let end = info.driver.iter().position(|byte| *byte == 0).unwrap_or(info.driver.len());
    let name = String::from_utf8_lossy(&info.driver[..end]).into_owned();
    debug_assert!(info.rest.len() == 160);
    Ok(name)
}

/// What there is under this name, in the network namespace of this thread. Needs no rights.
///
/// # Errors
/// The kernel's.
pub(crate) fn bridge(name: &str) -> io::Result<BridgeState> {
    let Ok(mut request) = Request::of(name) else { return Ok(BridgeState::Missing) };
    let socket = socket()?;
    match request.ask(socket.as_raw_fd(), libc::SIOCGIFINDEX as _) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(BridgeState::Missing),
        asked => asked?,
    }
    match driver(&socket, name) {
        Ok(driver) if driver == "bridge" => Ok(BridgeState::There),
        Ok(driver) => Ok(BridgeState::Other(driver)),
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            Ok(BridgeState::Other("unknown".into()))
        }
        Err(error) => Err(error),
    }
}

/// A tap interface that this process has open.
#[derive(Debug)]
pub(crate) struct Tap {
    /// The guest's end.
    pub(crate) file: File,
    /// What the host calls it.
    pub(crate) name: String,
}

/// Makes an interface, up, with frames of `mtu` bytes, and puts it into a bridge. It is called `wanted` or, where
/// another has that name, as the kernel likes. Nothing of it is left when the descriptor is closed.
///
/// # Errors
/// The step and the kernel's error.
pub(crate) fn make(wanted: &str, bridge: &str, mtu: u16) -> Result<Tap, TapError> {
    let told = |step: &'static str| move |error: io::Error| TapError { step, error };
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    let file = file.map_err(told("/dev/net/tun cannot be opened"))?;
    // Never an interface that is there already: that is another's.
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_TUN_EXCL;
    let flags = i16::from_ne_bytes((flags as u16).to_ne_bytes());
    let attach = |name: &str| {
        let mut request = Request::of(name)?.with(&flags.to_ne_bytes());
        request.ask(file.as_raw_fd(), libc::TUNSETIFF as _).map(|()| request.name())
    };
    let name = match attach(wanted) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EEXIST)) => {
            attach("tapio%d").map_err(told("a tap interface cannot be made"))?
        }
        made => made.map_err(told("a tap interface cannot be made"))?,
    };
    let socket = socket().map_err(told("a socket for its interface"))?;
    let ask = |step: &'static str, number: libc::c_ulong, name: &str, data: &[u8]| {
        let mut request = Request::of(name).map_err(told(step))?.with(data);
        request.ask(socket.as_raw_fd(), number).map_err(told(step))?;
        Ok::<_, TapError>(request)
    };
    let mut address = [0; 16];
    address[..2].copy_from_slice(&libc::ARPHRD_ETHER.to_ne_bytes());
    address[2..8].copy_from_slice(&HOST_END);
    ask("its interface gets no address", libc::SIOCSIFHWADDR as _, &name, &address)?;
    ask("its interface does not take its MTU", libc::SIOCSIFMTU as _, &name, &i32::from(mtu).to_ne_bytes())?;
    // The host has no address on this link; a kernel without IPv6 has no such file.
    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
    let index = ask("its interface is not found", libc::SIOCGIFINDEX as _, &name, &[])?.int();
    ask("its interface cannot be put into the bridge", SIOCBRADDIF, bridge, &index.to_ne_bytes())?;
    let up = i16::try_from(libc::IFF_UP).unwrap_or(1);
    ask("its interface cannot be brought up", libc::SIOCSIFFLAGS as _, &name, &up.to_ne_bytes())?;
    Ok(Tap { file, name })
}

/// Puts an interface that is in the bridge `from` into the bridge `to`. The same again is no error: it may be in
/// either.
///
/// # Errors
/// The step and the kernel's error; then it is in `from` again, if that is still there.
pub(crate) fn move_to(name: &str, from: &str, to: &str) -> Result<(), TapError> {
    let told = |step: &'static str| move |error: io::Error| TapError { step, error };
    let socket = socket().map_err(told("a socket for its interface"))?;
    let ask = |number: libc::c_ulong, name: &str, data: &[u8]| {
        let mut request = Request::of(name)?.with(data);
        request.ask(socket.as_raw_fd(), number).map(|()| request)
    };
    let index = ask(libc::SIOCGIFINDEX as _, name, &[]).map_err(told("its interface is not found"))?.int();
    let index = index.to_ne_bytes();
    let leave = |bridge: &str| match ask(SIOCBRDELIF, bridge, &index) {
        // It is not in there, or the bridge is gone.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENODEV)) => Ok(false),
        left => left.map(|_| true),
    };
    let told_leave = told("its interface cannot be taken out of its bridge");
    if !leave(from).map_err(told_leave)? {
        leave(to).map_err(told_leave)?;
    }
    ask(SIOCBRADDIF, to, &index).map(drop).map_err(|error| {
        if let Err(error) = ask(SIOCBRADDIF, from, &index) {
            tracing::warn!(name, from, %error, "an interface of a guest is in no bridge");
        }
        TapError { step: "its interface cannot be put into the bridge", error }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `linux/sockios.h`
    const SIOCBRADDBR: libc::c_ulong = 0x89a0;

    /// Runs something in a network namespace of a thread of its own; false where that is not allowed.
    fn apart(work: impl FnOnce() + Send) -> bool {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // SAFETY: it changes this thread alone, which ends with the test.
                if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                    return false;
                }
                work();
                true
            });
            thread.join().expect("the thread of the test")
        })
    }

    /// The number of an interface, as requests about bridges take it.
    fn index_of(socket: &OwnedFd, name: &str) -> [u8; 4] {
        let mut request = Request::of(name).unwrap();
        request.ask(socket.as_raw_fd(), libc::SIOCGIFINDEX as _).unwrap();
        request.int().to_ne_bytes()
    }

    fn is_there(name: &str) -> bool {
        let socket = socket().unwrap();
        Request::of(name).unwrap().ask(socket.as_raw_fd(), libc::SIOCGIFINDEX as _).is_ok()
    }

    #[test]
    fn an_interface_ends_with_its_descriptor() {
        const TEST: &str = "an_interface_ends_with_its_descriptor";
        let could = apart(|| {
            let socket = socket().unwrap();
            let name = c"br7".as_ptr();
            // SAFETY: the request takes a C string.
            let made = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCBRADDBR as _, name) };
            if made != 0 || !std::path::Path::new("/dev/net/tun").exists() {
                println!("skipped: needs network namespaces: bridges, /dev/net/tun [{TEST}]");
                return;
            }
            assert_eq!(bridge("br7").unwrap(), BridgeState::There);
            let first = match make("tap7.0", "br7", 9000) {
                Ok(first) => first,
                Err(error) => {
                    assert!(error.to_string().contains("tun"), "{error}");
                    println!("skipped: needs network namespaces: {error} [{TEST}]");
                    return;
                }
            };
            assert_eq!(first.name, "tap7.0");
            assert_eq!(bridge("tap7.0").unwrap(), BridgeState::Other("tun".into()));
            let mut asked = Request::of("tap7.0").unwrap();
            asked.ask(socket.as_raw_fd(), libc::SIOCGIFMTU as _).unwrap();
            assert_eq!(asked.int(), 9000);
            // The name is taken: it is not the same interface.
            let second = make("tap7.0", "br7", 1500).unwrap();
            assert!(second.name.starts_with("tapio"), "{}", second.name);
            let failed = make("tap7.1", "br8", 1500).unwrap_err().to_string();
            assert!(failed.contains("bridge") && !is_there("tap7.1"), "{failed}");
            assert!(is_there("tap7.0") && is_there(&second.name));
            // From one bridge into another, and the same again; where there is no such bridge it stays.
            // SAFETY: the request takes a C string.
            assert_eq!(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCBRADDBR as _, c"br9".as_ptr()) }, 0);
            let index = index_of(&socket, "tap7.0");
            let is_in = |bridge: &str| {
                let mut request = Request::of(bridge).unwrap().with(&index);
                // It is taken out and put back: what was asked for is whether it was there.
                let was = request.ask(socket.as_raw_fd(), SIOCBRDELIF).is_ok();
                assert!(!was || request.ask(socket.as_raw_fd(), SIOCBRADDIF).is_ok());
                was
            };
            for _ in 0..2 {
                move_to("tap7.0", "br7", "br9").unwrap();
                assert!(is_in("br9") && !is_in("br7"));
            }
            let failed = move_to("tap7.0", "br9", "br8").unwrap_err().to_string();
            assert!(failed.contains("bridge") && is_in("br9"), "{failed}");
            let name = second.name.clone();
            drop((first, second));
            assert!(!is_there("tap7.0") && !is_there(&name));
        });
        if !could {
            println!("skipped: needs network namespaces: root [{TEST}]");
        }
    }

    #[test]
    fn what_names_no_interface_is_no_bridge() {
        for name in ["", "a/b", "0123456789abcdef", "tapio-none"] {
            assert_eq!(bridge(name).unwrap(), BridgeState::Missing, "{name:?}");
        }
        assert!(matches!(bridge("lo").unwrap(), BridgeState::Other(_)));
    }
}
