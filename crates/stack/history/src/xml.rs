//! A whole history as XML that `rrdtool restore` reads, version 0003 of its format.

use std::fmt::Write;

use quick_xml::escape::escape;

use crate::figure::Short;
use crate::history::History;
use crate::layout::{HEARTBEAT_S, XFF};

/// All digits.
struct Exact(f64);

impl std::fmt::Display for Exact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_finite() { write!(f, "{:e}", self.0) } else { Short(self.0).fmt(f) }
    }
}

/// The whole history.
pub fn dump(history: &History) -> String {
    let mut xml = String::new();
    // A string takes everything.
    let _ = write(history, &mut xml);
    xml
}

fn write(history: &History, xml: &mut String) -> std::fmt::Result {
    let (step, updated) = (history.layout().step_s(), history.updated_ms() / 1000);
    write!(xml, "<?xml version=\"1.0\"?>\n<rrd><version>0003</version><step>{step}</step>")?;
    writeln!(xml, "<lastupdate>{updated}</lastupdate>")?;
    for column in &history.columns {
        let (source, begun) = (&column.source, &column.step);
        write!(xml, "<ds><name>{}</name><type>{}</type>", escape(source.name.as_ref()), source.kind.name())?;
        write!(xml, "<minimal_heartbeat>{HEARTBEAT_S}.0000</minimal_heartbeat>")?;
        write!(xml, "<min>{}</min><max>{}</max>", Exact(source.min), Exact(source.max))?;
        // A counter: rrdtool counts in whole numbers.
        let last = if begun.last.fract() == 0.0 {
            format!("{:.0}", begun.last)
        } else {
            Exact(begun.last).to_string()
        };
        write!(xml, "<last_ds>{last}</last_ds><value>{}</value>", Exact(begun.sum))?;
        writeln!(xml, "<unknown_sec>{:.0}</unknown_sec></ds>", begun.unknown_s.floor())?;
    }
    for (at, (function, span)) in history.layout().archives().enumerate() {
        write!(xml, "<rra><cf>{}</cf><pdp_per_row>{}</pdp_per_row>", function.name(), span.steps)?;
        writeln!(xml, "<params><xff>{XFF:.4}</xff></params><cdp_prep>")?;
        for column in &history.columns {
            let archive = &column.archives[at];
            write!(xml, "<ds><primary_value>{}</primary_value>", Short(archive.row(0)))?;
            write!(xml, "<secondary_value>NaN</secondary_value><value>{}</value>", Exact(archive.value))?;
            writeln!(xml, "<unknown_datapoints>{}</unknown_datapoints></ds>", archive.unknown)?;
        }
        xml.push_str("</cdp_prep><database>\n");
        for age in (0..u64::from(span.rows)).rev() {
            xml.push_str("<row>");
            for column in &history.columns {
                write!(xml, "<v>{}</v>", Short(column.archives[at].row(age)))?;
            }
            xml.push_str("</row>\n");
        }
        xml.push_str("</database></rra>\n");
    }
    xml.push_str("</rrd>\n");
    Ok(())
}
