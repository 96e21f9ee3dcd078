//! The daemon's files that a backup of its host has.

use tapio_api::accounts::{self, AccountFile};
use tapio_api::tls;
use tapio_core::backup::{ACCOUNTS, CERTIFICATE, HostFile, SETTINGS};

use crate::args::Options;
use crate::settings::{Settings, config_file};

/// The files, with what the daemon would have against others in their place.
pub fn of(settings: &Settings, options: &Options) -> Vec<HostFile> {
    let (now, given) = (settings.clone(), options.clone());
    let config = config_file(options);
    vec![
        HostFile {
            name: SETTINGS,
            path: std::path::absolute(config).unwrap_or_else(|_| config.to_path_buf()),
            check: Box::new(move |bytes| fits(bytes, &given, &now)),
        },
        HostFile {
            name: CERTIFICATE,
            path: settings.state_dir.join(tls::FILE),
            check: Box::new(tls::check_file),
        },
        HostFile {
            name: ACCOUNTS,
            path: settings.state_dir.join(accounts::FILE),
            check: Box::new(AccountFile::check),
        },
    ]
}

/// Whether a daemon with other settings starts, and finds what this one has.
fn fits(bytes: &[u8], options: &Options, now: &Settings) -> Result<(), String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "it is no text".to_owned())?;
    let then = Settings::gather_of(options, text)?;
    let dirs = [
        ("state-dir", &then.state_dir, &now.state_dir),
        ("run-dir", &then.run_dir, &now.run_dir),
        ("mount-dir", &then.mount_dir, &now.mount_dir),
    ];
    for (key, then, now) in dirs {
        if then != now {
            return Err(format!("its {key} is {}, and here it is {}", then.display(), now.display()));
        }
    }
    if then.pool.endpoints != now.pool.endpoints || then.pool.prefix != now.pool.prefix {
        return Err("its database is in another place of etcd".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_would_lose_what_is_here_do_not_fit() {
        let options = Options { state_dir: Some("/srv/state".into()), ..Options::default() };
        let now = Settings::gather_of(&options, "").expect("defaults");
        let fits = |text: &str| fits(text.as_bytes(), &options, &now);
        assert_eq!(fits("log-level = warn\nstate-dir = /elsewhere\n"), Ok(()), "the option wins");
        for (text, why) in [
            ("run-dir = /run/other", "run-dir is /run/other"),
            ("mount-dir = /mnt", "mount-dir"),
            ("etcd-endpoints = https://192.0.2.1:2379", "etcd"),
            ("colour = red", "line 1: there is no key"),
        ] {
            let said = fits(text).expect_err(text);
            assert!(said.contains(why), "{said}");
        }
    }
}
