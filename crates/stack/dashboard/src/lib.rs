//! The dashboard for browsers: files that are part of the program, and the headers that they are sent with.
//!
//! The files are written by hand and sent as they are: HTML, style sheets and ES modules. They load nothing from
//! elsewhere, and everything that they show comes from the API, by the account that is logged in.

/// A file of the dashboard.
#[derive(Clone, Copy, Debug)]
pub struct Asset {
    /// Its name below `/dashboard/`.
    pub name: &'static str,
    /// Its media type.
    pub kind: &'static str,
    /// Its contents.
    pub text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

macro_rules! assets {
    ($($kind:ident $name:literal)*) => {
        &[$(Asset { name: $name, kind: $kind, text: include_str!(concat!("../assets/", $name)) }),*]
    };
}

/// All files.
pub const ASSETS: &[Asset] = assets! {
    HTML "index.html"
    SVG "icon.svg"
    CSS "base.css"
    CSS "console.css"
    CSS "layout.css"
    CSS "parts.css"
    CSS "pictures.css"
    SCRIPT "actions.js"
    SCRIPT "api.js"
    SCRIPT "app.js"
    SCRIPT "bytes.js"
    SCRIPT "chains.js"
    SCRIPT "charts.js"
    SCRIPT "console.js"
    SCRIPT "dialog.js"
    SCRIPT "dom.js"
    SCRIPT "errors.js"
    SCRIPT "figures.js"
    SCRIPT "format.js"
    SCRIPT "history.js"
    SCRIPT "keysyms.js"
    SCRIPT "login.js"
    SCRIPT "notices.js"
    SCRIPT "rfb.js"
    SCRIPT "roles.js"
    SCRIPT "screen.js"
    SCRIPT "store.js"
    SCRIPT "table.js"
    SCRIPT "terminal.js"
    SCRIPT "timeline.js"
    SCRIPT "view-console.js"
    SCRIPT "view-findings.js"
    SCRIPT "view-history.js"
    SCRIPT "view-overview.js"
    SCRIPT "view-performance.js"
    SCRIPT "view-storage.js"
    SCRIPT "view-tasks.js"
    SCRIPT "view-vdi.js"
    SCRIPT "view-vms.js"
    SCRIPT "vt.js"
};

/// Headers of every answer. The policy lets the page load scripts, styles, pictures and data from this server alone,
/// and lets no other page frame it.
pub const HEADERS: [(&str, &str); 6] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
         form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    // The files are those of the daemon that runs; another version has others under the same names.
    ("cache-control", "no-cache"),
];

/// The file at a path of the server, as `/dashboard/app.js`; `/dashboard/` is the page itself.
pub fn asset(path: &str) -> Option<&'static Asset> {
    let name = match path.strip_prefix("/dashboard/")? {
        "" => "index.html",
        name => name,
    };
    ASSETS.iter().find(|asset| asset.name == name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_file_is_served_under_its_name() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
        let there: BTreeSet<String> = std::fs::read_dir(dir)
            .expect("the assets")
            .map(|entry| entry.expect("an entry").file_name().into_string().expect("text"))
            .collect();
        let served: BTreeSet<String> = ASSETS.iter().map(|asset| asset.name.to_owned()).collect();
        assert_eq!(there, served);
        assert_eq!(asset("/dashboard/").map(|asset| asset.name), Some("index.html"));
        for path in ["/dashboard", "/dashboard/../Cargo.toml", "/dashboard//app.js", "/metrics"] {
            assert!(asset(path).is_none(), "{path}");
        }
    }

    /// Names in quotes behind `mark`.
    fn quoted<'a>(text: &'a str, mark: &'a str) -> impl Iterator<Item = &'a str> {
        text.split(mark).skip(1).filter_map(|rest| rest.split('"').next())
    }

    #[test]
    fn files_name_only_files_that_are_served() {
        for file in ASSETS {
            for mark in ["from \"./", "import \"./", "src=\"", "href=\""] {
                for name in quoted(file.text, mark).filter(|name| !name.starts_with(['#', '$'])) {
                    assert!(ASSETS.iter().any(|asset| asset.name == name), "{} names {name}", file.name);
                }
            }
        }
    }

    #[test]
    fn files_keep_to_the_policy() {
        for file in ASSETS {
            let own = file.text.replace("http://www.w3.org/", "");
            for foreign in
                ["http://", "https://", "innerHTML", "eval(", "new Function", " style=\"", " onclick=\""]
            {
                assert!(!own.contains(foreign), "{} has {foreign}", file.name);
            }
        }
        let page = asset("/dashboard/").expect("the page").text;
        assert!(!page.contains("<style"), "a style sheet within the page");
        assert_eq!(page.matches("<script").count(), page.matches("<script type=\"module\" src=").count());
    }

    #[test]
    fn the_policy_denies_what_is_not_named() {
        let (_, policy) = HEADERS[0];
        assert!(policy.starts_with("default-src 'none'"), "{policy}");
        assert!(policy.contains("frame-ancestors 'none'") && !policy.contains("unsafe"), "{policy}");
    }
}
