//! What each program does and prints. One that is not known here, or is called in another way than LVM is by
//! [`super::super::commands`], fails.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Write as _;
use std::fs;

use super::state::{FIRST, Group, PLACE, Place, State, Volume, start};
use super::{Inner, Loop, label};
use crate::lvm::names;
use crate::lvm::resign::label::fresh_id;
use crate::lvm::size::{EXTENT, rounded};

/// The longest name that the device mapper takes.
const NAME_MAX: usize = 127;

type Done = Result<(), String>;

/// The options and words of a command line.
struct Line<'a> {
    options: BTreeMap<&'a str, &'a str>,
    words: Vec<&'a str>,
}

impl<'a> Line<'a> {
    fn of(arguments: &[&'a str]) -> Self {
        const WITH_VALUE: &[&str] = &[
            "--config",
            "--reportformat",
            "--units",
            "-o",
            "-n",
            "-L",
            "-S",
            "-f",
            "--addtag",
            "--deltag",
            "--metadatasize",
        ];
        let (mut options, mut words) = (BTreeMap::new(), Vec::new());
        let mut rest = arguments.iter().copied().peekable();
        while let Some(word) = rest.next() {
            if !word.starts_with('-') {
                words.push(word);
                continue;
            }
            // `-f` of vgcfgbackup has a file, that of lvremove nothing.
            let takes = WITH_VALUE.contains(&word)
                && (word != "-f" || rest.peek().is_some_and(|next| next.starts_with("/")));
            let value = if takes { rest.next().unwrap_or_default() } else { "" };
            options.insert(word, value);
        }
        Self { options, words }
    }

    fn has(&self, option: &str) -> bool {
        self.options.contains_key(option)
    }

    fn value(&self, option: &str) -> Result<&'a str, String> {
        self.options.get(option).copied().ok_or_else(|| format!("{option} is missing"))
    }

    fn len(&self) -> Result<u64, String> {
        let text = self.value("-L")?;
        let len = text.strip_suffix('b').and_then(|digits| digits.parse::<u64>().ok());
        len.map(rounded).ok_or_else(|| format!("'{text}' is no length in bytes"))
    }
}

pub(super) fn run(host: &Inner, program: &str, arguments: &[&str]) -> Result<String, String> {
    host.tick();
    let line = Line::of(arguments);
    match program {
        "lvs" | "vgs" | "pvs" => return table(host, program, &line),
        _ => {}
    }
    let done = match program {
        "pvcreate" => mark(host),
        "pvremove" => unmark(host),
        "pvresize" => Ok(()),
        "vgcreate" => group(host, &line),
        "vgchange" => change_group(host, &line),
        "vgremove" => remove_group(host),
        "vgimportclone" => import(host, &line),
        "vgcfgbackup" => backup(host, &line),
        "vgcfgrestore" => restore(host, &line),
        "lvcreate" => create(host, &line),
        "lvremove" => each(host, &line, |state, at| {
            let group = state.group.as_mut().ok_or("no group")?;
            let volume = group.volumes.remove(at);
            host.unlink(&group.name, &volume.name);
            Ok(())
        }),
        "lvrename" => rename(host, &line),
        "lvextend" | "lvreduce" => resize(host, program, &line),
        "lvchange" => change(host, &line),
        other => Err(format!("the double of LVM knows no '{other}'")),
    };
    done.map(|()| String::new())
}

/// Changes the state at once, if all is well.
fn with_state(host: &Inner, work: impl FnOnce(&mut State) -> Done) -> Done {
    let mut held = host.state.lock();
    let mut state = held.clone();
    work(&mut state)?;
    state.write(&host.dir).map_err(|error| error.to_string())?;
    *held = state;
    Ok(())
}

/// The volumes that a line names, one change for each.
fn each(host: &Inner, line: &Line<'_>, work: impl Fn(&mut State, usize) -> Done) -> Done {
    let is_away = line.has("-an")
        || line.words.is_empty()
        || !line
            .options
            .keys()
            .any(|option| option.starts_with("-a") || option.starts_with("-p") || option.ends_with("tag"));
    for (number, word) in line.words.iter().enumerate() {
        if number > 0 {
            host.tick();
        }
        with_state(host, |state| {
            let group = state.group.as_ref().ok_or("no group")?;
            let name = word.split_once('/').map_or(*word, |(_, name)| name);
            let at = group.volumes.iter().position(|volume| volume.name == name);
            let at = at.ok_or_else(|| format!("Failed to find logical volume \"{word}\""))?;
            let place = state.places.get(&group.volumes[at].place);
            if is_away && group.volumes[at].is_active && place.is_some_and(|place| place.device.is_open()) {
                return Err(format!("Logical volume {word} in use."));
            }
            work(state, at)
        })?;
    }
    Ok(())
}

fn mark(host: &Inner) -> Done {
    with_state(host, |state| {
        if state.group.is_some() {
            return Err("the device belongs to a group".into());
        }
        let id = fresh_id();
        label::write(&host.device, &id).map_err(|error| error.to_string())?;
        state.mark = Some(id);
        Ok(())
    })
}

fn unmark(host: &Inner) -> Done {
    with_state(host, |state| {
        if state.group.is_some() {
            return Err("the device belongs to a group".into());
        }
        state.mark = None;
        label::remove(&host.device).map_err(|error| error.to_string())
    })
}

fn group(host: &Inner, line: &Line<'_>) -> Done {
    with_state(host, |state| {
        if state.mark.is_none() || state.group.is_some() {
            return Err("the device has no mark, or belongs to a group".into());
        }
        let name = line.words.first().ok_or("no name")?;
        state.group = Some(Group { name: (*name).to_owned(), ..Group::default() });
        Ok(())
    })
}

fn change_group(host: &Inner, line: &Line<'_>) -> Done {
    with_state(host, |state| {
        let places = state.places.clone();
        let group = state.group.as_mut().ok_or("no group")?;
        if line.has("-an") {
            for volume in group.volumes.iter_mut().filter(|volume| volume.is_active) {
                if places.get(&volume.place).is_some_and(|place| place.device.is_open()) {
                    return Err(format!("Logical volume {} in use.", volume.name));
                }
                host.unlink(&group.name, &volume.name);
                volume.is_active = false;
            }
        }
        if let Ok(tag) = line.value("--addtag") {
            group.tags.push(tag.to_owned());
        }
        if let Ok(tag) = line.value("--deltag") {
            group.tags.retain(|known| known != tag);
        }
        Ok(())
    })
}

fn remove_group(host: &Inner) -> Done {
    with_state(host, |state| {
        let group = state.group.take().ok_or("no group")?;
        for volume in &group.volumes {
            let place = state.places.get(&volume.place);
            if volume.is_active && place.is_some_and(|place| place.device.is_open()) {
                return Err(format!("Logical volume {} in use.", volume.name));
            }
            host.unlink(&group.name, &volume.name);
        }
        Ok(())
    })
}

/// The label of the device first, then what the group knows.
fn import(host: &Inner, line: &Line<'_>) -> Done {
    let id = fresh_id();
    label::write(&host.device, &id).map_err(|error| error.to_string())?;
    host.tick();
    with_state(host, |state| {
        let group = state.group.as_mut().ok_or("no group")?;
        if group.volumes.iter().any(|volume| volume.is_active) {
            return Err("volumes are active".into());
        }
        group.name = line.value("-n")?.to_owned();
        state.mark = Some(id);
        Ok(())
    })
}

/// As LVM writes it, as far as it matters here.
fn backup(host: &Inner, line: &Line<'_>) -> Done {
    let state = host.state.lock().clone();
    let group = state.group.ok_or("no group")?;
    let tags: Vec<String> = group.tags.iter().map(|tag| format!("\"{tag}\"")).collect();
    let mut text = format!("contents = \"Text Format Volume Group\"\n\n{} {{\n", group.name);
    let _ = writeln!(text, "\ttags = [{}]\n\tlogical_volumes {{\n", tags.join(", "));
    for volume in &group.volumes {
        let _ = writeln!(
            text,
            "\t\t{} {{\n\t\t\tid = \"{}\"\n\t\t\tplace = {}\n\t\t\tsegment1 {{\n\t\t\t\ttype = \"striped\"\n\
             \t\t\t\tstripe_count = 1\t# linear\n\t\t\t}}\n\t\t}}\n",
            volume.name, volume.uuid, volume.place
        );
    }
    text.push_str("\t}\n}\n");
    fs::write(line.value("-f")?, text).map_err(|error| error.to_string())
}

fn restore(host: &Inner, line: &Line<'_>) -> Done {
    let text = fs::read_to_string(line.value("-f")?).map_err(|error| error.to_string())?;
    with_state(host, |state| {
        let group = state.group.as_mut().ok_or("no group")?;
        let (mut name, mut id, mut kept) = (String::new(), String::new(), Vec::new());
        for line in text.lines() {
            if let Some(tags) = line.strip_prefix("\ttags = [") {
                let tags = tags.trim_end_matches(']').split(", ").map(|tag| tag.trim_matches('"').to_owned());
                group.tags = tags.filter(|tag| !tag.is_empty()).collect();
            } else if let Some(new) = line.strip_prefix("\t\t\tid = ") {
                id = new.trim_matches('"').to_owned();
            } else if let Some(place) = line.strip_prefix("\t\t\tplace = ") {
                let known = group.volumes.iter().find(|volume| volume.place.to_string() == place);
                let known = known.ok_or("an unknown volume")?.clone();
                kept.push(Volume { name: name.clone(), uuid: id.clone(), ..known });
            } else if let Some(new) = line.strip_prefix("\t\t").and_then(|rest| rest.strip_suffix(" {"))
                && !new.starts_with('\t')
            {
                name = new.to_owned();
            }
        }
        group.volumes = kept;
        Ok(())
    })
}

fn check_name(group: &Group, name: &str) -> Done {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "+_.-".contains(c);
    if name.is_empty() || name.starts_with('-') || !name.chars().all(is_plain) {
        return Err(format!("'{name}' is no name of a volume"));
    }
    if names::mapper(&group.name, name).len() > NAME_MAX {
        return Err(format!("the name '{name}' is too long"));
    }
    match group.volumes.iter().any(|volume| volume.name == name) {
        true => Err(format!("Logical Volume \"{name}\" already exists in volume group")),
        false => Ok(()),
    }
}

fn create(host: &Inner, line: &Line<'_>) -> Done {
    let (name, len) = (line.value("-n")?, line.len()?);
    with_state(host, |state| {
        if len > state.free() || len > PLACE || len == 0 {
            return Err(format!("insufficient free space: {} bytes are free", state.free()));
        }
        let place = state.free_place().ok_or("no place is free")?;
        if let Entry::Vacant(free) = state.places.entry(place) {
            let made = Loop::over(&host.dir.join("disk"), start(place), len);
            free.insert(Place::new(made.map_err(|error| error.to_string())?, len));
        }
        let volume = Volume {
            name: name.to_owned(),
            uuid: fresh_id(),
            place,
            len,
            tags: line.value("--addtag").map(str::to_owned).into_iter().collect(),
            is_writable: true,
            is_active: true,
        };
        check_name(state.group.as_ref().ok_or("no group")?, name)?;
        host.link(state, &volume).map_err(|error| error.to_string())?;
        if let Some(group) = &mut state.group {
            group.volumes.push(volume);
        }
        Ok(())
    })
}

fn rename(host: &Inner, line: &Line<'_>) -> Done {
    let [_, from, to]: [&str; 3] = line.words.clone().try_into().map_err(|_| "three words")?;
    with_state(host, |state| {
        let group = state.group.as_mut().ok_or("no group")?;
        check_name(group, to)?;
        let volume = group.volumes.iter_mut().find(|volume| volume.name == from);
        let volume = volume.ok_or_else(|| format!("there is no volume {from}"))?;
        volume.name = to.to_owned();
        let volume = volume.clone();
        if volume.is_active {
            host.unlink(&group.name, from);
            host.link(state, &volume).map_err(|error| error.to_string())?;
        }
        Ok(())
    })
}

fn resize(host: &Inner, program: &str, line: &Line<'_>) -> Done {
    let len = line.len()?;
    let (_, name) = line.words.first().and_then(|word| word.split_once('/')).ok_or("no volume")?;
    with_state(host, |state| {
        let free = state.free();
        let group = state.group.as_mut().ok_or("no group")?;
        let volume = group.volumes.iter_mut().find(|volume| volume.name == name);
        let volume = volume.ok_or_else(|| format!("there is no volume {name}"))?;
        if (program == "lvextend") != (len > volume.len) {
            return Err(format!("{len} bytes are not what {program} makes of {}", volume.len));
        }
        if len.saturating_sub(volume.len) > free || len > PLACE {
            return Err(format!("insufficient free space: {free} bytes are free"));
        }
        volume.len = len;
        let volume = volume.clone();
        if volume.is_active {
            host.link(state, &volume).map_err(|error| error.to_string())?;
        }
        Ok(())
    })
}

fn change(host: &Inner, line: &Line<'_>) -> Done {
    each(host, line, |state, at| {
        let group = state.group.as_mut().ok_or("no group")?;
        let (name, volume) = (group.name.clone(), &mut group.volumes[at]);
        let was_active = volume.is_active;
        for (option, value) in &line.options {
            match *option {
                "-ay" => volume.is_active = true,
                "-an" => volume.is_active = false,
                "-prw" | "-pr" if volume.is_writable == (*option == "-prw") => {
                    return Err(format!("{} has that permission already", volume.name));
                }
                "-prw" => volume.is_writable = true,
                "-pr" => volume.is_writable = false,
                "--addtag" => volume.tags.push((*value).to_owned()),
                "--deltag" => volume.tags.retain(|tag| tag != value),
                "--config" => {}
                other => return Err(format!("the double knows no {other}")),
            }
        }
        let volume = volume.clone();
        if volume.is_active {
            return host.link(state, &volume).map_err(|error| error.to_string());
        }
        if was_active {
            host.unlink(&name, &volume.name);
        }
        Ok(())
    })
}

/// All fields that are known, of each row of a program.
fn rows(host: &Inner, program: &str, line: &Line<'_>) -> Result<Vec<BTreeMap<&'static str, String>>, String> {
    let state = host.state.lock().clone();
    let device = host.device.to_string_lossy().into_owned();
    let group = state.group.clone();
    let named = group.as_ref().map(|group| group.name.clone()).unwrap_or_default();
    let asked = line.words.first().copied().filter(|word| !word.starts_with('/'));
    let selected = line.options.get("-S").and_then(|text| text.strip_prefix("vg_name="));
    if asked.is_some_and(|asked| asked != named) {
        return Err(format!("Volume group \"{}\" not found", asked.unwrap_or_default()));
    }
    if selected.is_some_and(|selected| selected != named) || (program == "pvs" && state.mark.is_none()) {
        return Ok(Vec::new());
    }
    let mark = state.mark.clone().unwrap_or_default();
    let is_missing = group.is_some() && !label::is(&host.device, &mark);
    let flag = |is: bool, word: &str| if is { word.to_owned() } else { String::new() };
    let common = BTreeMap::from([
        ("vg_name", named),
        ("vg_tags", group.as_ref().map(|group| group.tags.join(",")).unwrap_or_default()),
        ("vg_extent_size", EXTENT.to_string()),
        ("vg_size", state.room.to_string()),
        ("vg_free", state.free().to_string()),
        ("vg_missing_pv_count", u8::from(is_missing).to_string()),
        ("pv_name", device.clone()),
        ("pv_uuid", mark),
        ("pv_in_use", flag(group.is_some(), "used")),
        ("pv_missing", flag(is_missing, "missing")),
        ("pe_start", FIRST.to_string()),
        ("pv_size", state.room.to_string()),
        ("dev_size", (state.room + FIRST).to_string()),
    ]);
    if program != "lvs" {
        return Ok(if program == "vgs" && group.is_none() { Vec::new() } else { vec![common] });
    }
    let of = |volume: &Volume| {
        let is_open =
            volume.is_active && state.places.get(&volume.place).is_some_and(|place| place.device.is_open());
        let mut row = common.clone();
        row.extend([
            ("lv_name", volume.name.clone()),
            ("lv_uuid", volume.uuid.clone()),
            ("lv_size", volume.len.to_string()),
            ("lv_tags", volume.tags.join(",")),
            ("lv_active", flag(volume.is_active, "active")),
            ("lv_device_open", flag(is_open, "open")),
            ("lv_attr", format!("-{}i-------", if volume.is_writable { 'w' } else { 'r' })),
            ("segtype", "linear".into()),
            ("seg_start", "0".into()),
            ("seg_size", volume.len.to_string()),
            ("devices", format!("{device}({})", volume.place * PLACE / EXTENT)),
        ]);
        row
    };
    Ok(group.iter().flat_map(|group| &group.volumes).map(of).collect())
}

fn table(host: &Inner, program: &str, line: &Line<'_>) -> Result<String, String> {
    let fields: Vec<&str> = line.value("-o")?.split(',').collect();
    let mut printed = Vec::new();
    for row in rows(host, program, line)? {
        let mut said = serde_json::Map::new();
        for field in &fields {
            let value = row.get(field).ok_or_else(|| format!("the double knows no field {field}"))?;
            said.insert((*field).to_owned(), value.clone().into());
        }
        printed.push(serde_json::Value::Object(said));
    }
    let name = match program {
        "lvs" => "seg",
        "vgs" => "vg",
        _ => "pv",
    };
    Ok(serde_json::json!({ "report": [{ name: printed }] }).to_string())
}
