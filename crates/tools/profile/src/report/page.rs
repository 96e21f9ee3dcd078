//! A profile as one page: everything it shows is inside.

use std::fmt::Write as _;

use tapio_report::plot::escaped;

use super::pictures::{pictures, short};
use super::text::{costs, sentence};
use crate::profile::Profile;

const STYLE: &str = "body{font-family:sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#222}\
    table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}\
    th:first-child,td:first-child{text-align:left}svg{max-width:100%;height:auto;display:block;margin:1.5em 0}\
    .note{background:#fff3cd;padding:.4em .8em}";

fn list(into: &mut String, title: &str, lines: impl IntoIterator<Item = String>) {
    let lines: Vec<String> = lines.into_iter().collect();
    if lines.is_empty() {
        return;
    }
    let _ = write!(into, "<h2>{title}</h2>\n<ul>\n");
    for line in lines {
        let _ = writeln!(into, "<li>{}</li>", escaped(&line));
    }
    into.push_str("</ul>\n");
}

/// The page.
pub fn page(profile: &Profile) -> String {
    let target = escaped(&profile.target);
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><title>Profile of {target}</title>\
         <style>{STYLE}</style></head><body>\n<h1>Profile of {target}</h1>\n<p>{}, sectors of {} bytes, Linux {}</p>\n",
        tapio_report::size::size(profile.len),
        profile.sector_len,
        escaped(&profile.kernel)
    );
    for note in &profile.notes {
        let _ = writeln!(page, "<p class=\"note\">{}</p>", escaped(note));
    }
    list(&mut page, "What it is", profile.findings.iter().map(sentence));
    list(&mut page, "Advice", profile.advice.reasons.iter().cloned());
    list(
        &mut page,
        "Settings",
        profile.advice.settings().iter().map(|(key, value)| format!("{key}={value}")),
    );
    list(&mut page, "Costs", costs(profile).iter().map(|(name, value)| format!("{name}: {value}")));
    page.push_str("<h2>Pictures</h2>\n");
    for picture in pictures(profile) {
        page.push_str(&picture.svg);
    }
    for sweep in profile.sweeps.iter().filter(|sweep| !sweep.samples.is_empty()) {
        let _ = write!(
            page,
            "<h2>Latencies of {}</h2>\n<table><tr><th>block</th><th>in flight</th><th>MB/s</th><th>median us</th>\
             <th>90 % us</th><th>99 % us</th><th>99.9 % us</th><th>longest us</th></tr>\n",
            sweep.name()
        );
        for sample in &sweep.samples {
            let _ = writeln!(
                page,
                "<tr><td>{}</td><td>{}</td><td>{:.1}</td><td>{:.0}</td><td>{:.0}</td><td>{:.0}</td><td>{:.0}</td>\
                 <td>{:.0}</td></tr>",
                short(sample.shape.block_len),
                sample.shape.depth,
                sample.mb_s(),
                sample.p50_us,
                sample.p90_us,
                sample.p99_us,
                sample.p999_us,
                sample.max_us
            );
        }
        page.push_str("</table>\n");
    }
    page.push_str("</body></html>\n");
    page
}
