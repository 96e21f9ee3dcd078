//! Names of servers, paths and mount options that clients give. They become arguments of a mount program, so that
//! what could be read as something else is refused.

use tapio_types::ApiError;

use crate::errors;

/// Longest name of a server; RFC 1035.
const SERVER_LEN_MAX: usize = 253;
/// Longest path that the kernel takes.
const PATH_LEN_MAX: usize = 4095;
/// Options that would change what this code relies on.
const REFUSED: &[&str] = &[
    "bg",
    "suid",
    "dev",
    "exec",
    "remount",
    "bind",
    "rbind",
    "move",
    "user",
    "users",
    "username",
    "password",
    "pass",
    "password2",
    "credentials",
    "cred",
    "guest",
    "addr",
    "ip",
    "mountaddr",
    "vers",
    "nfsvers",
    "v3",
    "v4",
    "minorversion",
];

/// A name or an address of a host, as a mount program takes it: an address of IP version 6 stands in brackets.
///
/// # Errors
/// `number` if it is none.
pub(crate) fn server(text: &str, number: u16) -> Result<String, ApiError> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    if let Ok(address) = bare.parse::<std::net::Ipv6Addr>() {
        return Ok(format!("[{address}]"));
    }
    let is_name = !text.is_empty()
        && text.len() <= SERVER_LEN_MAX
        && !text.starts_with(['-', '.'])
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_'));
    if is_name {
        return Ok(text.to_owned());
    }
    Err(errors::fail(number, format_args!("'{text}' is no name or address of a server")))
}

/// An absolute path on a server, without a slash at its end.
///
/// # Errors
/// `number` if it is none.
pub(crate) fn path(text: &str, number: u16) -> Result<String, ApiError> {
    let is_path = text.starts_with('/')
        && text.len() <= PATH_LEN_MAX
        && !text.chars().any(char::is_control)
        && !text.split('/').any(|part| part == "..");
    if !is_path {
        return Err(errors::fail(number, format_args!("'{text}' is no absolute path")));
    }
    Ok(match text.trim_end_matches('/') {
        "" => "/".into(),
        path => path.into(),
    })
}

/// `path` with `below` at its end.
pub(crate) fn join(path: &str, below: Option<&str>) -> String {
    match below {
        None => path.to_owned(),
        Some(below) => format!("{}/{below}", path.trim_end_matches('/')),
    }
}

/// Mount options of an administrator, with commas between them.
///
/// # Errors
/// 228 for one that is refused, and what to use instead.
pub(crate) fn options(text: &str) -> Result<Vec<String>, ApiError> {
    let refused = |option: &str, why: &str| {
        errors::fail(228, format_args!("device_config:options has '{option}': {why}"))
    };
    let mut all = Vec::new();
    for option in text.split(',').map(str::trim).filter(|option| !option.is_empty()) {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_=.:-/@%+".contains(&byte);
        if !option.bytes().all(allowed) || option.starts_with('-') {
            return Err(refused(option, "it has characters that mount options do not have"));
        }
        let name = option.split_once('=').map_or(option, |(name, _)| name);
        if REFUSED.contains(&name) {
            return Err(refused(option, "it is chosen by this host, or has a device_config key of its own"));
        }
        all.push(option.to_owned());
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_names_and_addresses() {
        for good in ["nas", "nas.example.org", "10.0.0.1", "nas_1"] {
            assert_eq!(server(good, 102).as_deref(), Ok(good));
        }
        assert_eq!(server("fd00::1", 102).as_deref(), Ok("[fd00::1]"));
        assert_eq!(server("[fd00::1]", 102).as_deref(), Ok("[fd00::1]"));
        for bad in ["", "-o", "a b", "a,b", "a/b", "a:b", ".x", "[x]", "a\n", &"x".repeat(254)] {
            assert_eq!(server(bad, 102).expect_err(bad).code, "SR_BACKEND_FAILURE_102");
        }
    }

    #[test]
    fn paths_are_absolute() {
        assert_eq!(path("/srv/x/", 103).as_deref(), Ok("/srv/x"));
        assert_eq!(path("/", 103).as_deref(), Ok("/"));
        for bad in ["", "srv", "/srv/../etc", "/a\nb", "-x"] {
            assert_eq!(path(bad, 103).expect_err(bad).code, "SR_BACKEND_FAILURE_103");
        }
        assert_eq!(join("/", Some("a")), "/a");
        assert_eq!(join("/srv", Some("a")), "/srv/a");
        assert_eq!(join("/srv", None), "/srv");
    }

    #[test]
    fn options_that_change_what_is_relied_on_are_refused() {
        assert_eq!(options(" soft, timeo=30,").unwrap(), ["soft", "timeo=30"]);
        assert!(options("").unwrap().is_empty());
        for bad in ["bg", "vers=3", "password=x", "a b", "x;y", "-o", "addr=1.2.3.4", "suid"] {
            assert_eq!(options(bad).expect_err(bad).code, "SR_BACKEND_FAILURE_228");
        }
    }
}
