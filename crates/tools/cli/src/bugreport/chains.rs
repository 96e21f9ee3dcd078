//! Chains of images as the daemon's records have them: a tree for each base.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde_json::Value;

const NULL_REF: &str = "OpaqueRef:NULL";

/// Deepest image that is drawn below its base.
const DEPTH_MAX: usize = 64;

fn text<'a>(vdi: &'a Value, field: &str) -> &'a str {
    vdi.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// A number, which some answers have as text.
fn number(vdi: &Value, field: &str) -> String {
    let value = vdi.get(field).cloned().unwrap_or_default();
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Draws the chains of all VDIs.
pub(super) fn chains(vdis: &Value) -> String {
    let all: BTreeMap<&str, &Value> =
        vdis.as_object().into_iter().flatten().map(|(reference, vdi)| (reference.as_str(), vdi)).collect();
    let mut below: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for (reference, vdi) in &all {
        let parent = text(vdi, "parent");
        // One whose parent has no record begins a tree of its own.
        let parent = if all.contains_key(parent) { parent } else { NULL_REF };
        below.entry((text(vdi, "SR"), parent)).or_default().push(reference);
    }
    let mut out = String::new();
    let mut drawn = BTreeSet::new();
    let roots: Vec<(&str, &str)> = below
        .iter()
        .filter(|((_, parent), _)| *parent == NULL_REF)
        .flat_map(|((sr, _), roots)| roots.iter().map(|root| (*sr, *root)))
        .collect();
    let mut last = "";
    for (sr, root) in roots {
        if sr != last {
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(out, "SR {sr}");
            last = sr;
        }
        let mut stack = vec![(root, 0)];
        while let Some((reference, depth)) = stack.pop() {
            let Some(vdi) = all.get(reference).filter(|_| drawn.insert(reference)) else { continue };
            let kind = match (vdi["managed"].as_bool(), vdi["is_a_snapshot"].as_bool()) {
                (Some(false), _) => "base copy",
                (_, Some(true)) => "snapshot",
                _ => "disk",
            };
            let parent = text(vdi, "parent");
            let lacks = parent != NULL_REF && !parent.is_empty() && !all.contains_key(parent);
            let _ = writeln!(
                out,
                "{:indent$}{} {kind} {} bytes, {} used '{}'{}{}",
                "",
                text(vdi, "uuid"),
                number(vdi, "virtual_size"),
                number(vdi, "physical_utilisation"),
                text(vdi, "name_label"),
                if vdi["missing"].as_bool() == Some(true) { ", missing" } else { "" },
                if lacks { ", its parent has no record" } else { "" },
                indent = 2 + 2 * depth.min(DEPTH_MAX)
            );
            let children = below.get(&(sr, reference)).into_iter().flatten();
            stack.extend(children.map(|child| (*child, depth + 1)));
        }
    }
    let left = all.keys().filter(|reference| !drawn.contains(*reference)).count();
    if left > 0 {
        let _ = writeln!(out, "{left} VDIs have parents in a circle, or in another SR");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn chains_are_trees() {
        let vdi = |name: &str, parent: &str, managed: bool| {
            json!({"uuid": name, "name_label": name, "SR": "s", "parent": parent, "managed": managed,
                "virtual_size": "4096", "physical_utilisation": 7})
        };
        let vdis = json!({"OpaqueRef:a": vdi("a", NULL_REF, false), "OpaqueRef:b": vdi("b", "OpaqueRef:a", true),
            "OpaqueRef:c": vdi("c", "OpaqueRef:gone", true), "OpaqueRef:d": vdi("d", "OpaqueRef:d", true)});
        let text = chains(&vdis);
        assert!(text.starts_with("SR s\n  a base copy 4096 bytes, 7 used 'a'\n    b disk"), "{text}");
        assert!(text.contains("c disk 4096 bytes, 7 used 'c', its parent has no record"), "{text}");
        assert!(text.ends_with("1 VDIs have parents in a circle, or in another SR\n"), "{text}");
    }
}
