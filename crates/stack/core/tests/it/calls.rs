//! Generic messages: records, getters, setters, queries, and the errors of wrong calls.

use tapio_core::Peer;
use tapio_model::{NULL_REF, Value};

use crate::world::{Client, map, needed, stack, text, texts};

#[test]
fn a_field_is_set_added_to_and_read_in_every_way() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let pool = texts(&admin.call("pool.get_all", vec![]));
    assert_eq!(pool.len(), 1, "there is exactly one pool");
    let pool = Value::from(pool[0].as_str());

    admin.call("pool.set_name_label", vec![pool.clone(), "ours".into()]);
    assert_eq!(text(&admin.call("pool.get_name_label", vec![pool.clone()])), "ours");
    let record = admin.call("pool.get_record", vec![pool.clone()]);
    assert_eq!(text(&map(&record)["name_label"]), "ours");
    let uuid = map(&record)["uuid"].clone();
    assert_eq!(admin.call("pool.get_by_uuid", vec![uuid]), pool);
    let all = admin.call("pool.get_all_records", vec![]);
    assert_eq!(map(&all)[&text(&pool)], record);

    let add =
        |key: &str| admin.try_call("pool.add_to_other_config", vec![pool.clone(), key.into(), "v".into()]);
    add("k").expect("a new key");
    let error = add("k").expect_err("the key is there");
    assert_eq!(error.code, "MAP_DUPLICATE_KEY");
    assert_eq!(error.params, ["pool", "other_config", &text(&pool), "k"]);
    admin.call("pool.remove_from_other_config", vec![pool.clone(), "k".into()]);
    admin.call("pool.remove_from_other_config", vec![pool.clone(), "k".into()]);
    assert!(map(&admin.call("pool.get_other_config", vec![pool.clone()])).is_empty());

    for tag in ["a", "b", "a"] {
        admin.call("pool.add_tags", vec![pool.clone(), tag.into()]);
    }
    admin.call("pool.remove_tags", vec![pool.clone(), "b".into()]);
    assert_eq!(texts(&admin.call("pool.get_tags", vec![pool.clone()])), ["a"]);
}

#[test]
fn wrong_calls_get_their_documented_errors() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let pool = texts(&admin.call("pool.get_all", vec![]))[0].clone();
    let pool = || Value::from(pool.as_str());
    assert_eq!(admin.code("pool.no_such", vec![]), "MESSAGE_METHOD_UNKNOWN");
    assert_eq!(admin.code("nonsense", vec![]), "MESSAGE_METHOD_UNKNOWN");
    assert_eq!(admin.code("Async.pool.get_all", vec![]), "MESSAGE_METHOD_UNKNOWN");
    let error = admin.try_call("pool.set_name_label", vec![pool()]).expect_err("one is missing");
    assert_eq!(error.code, "MESSAGE_PARAMETER_COUNT_MISMATCH");
    assert_eq!(error.params, ["pool.set_name_label", "3", "2"]);
    let error = admin.try_call("pool.set_name_label", vec![pool(), Value::Int(3)]).expect_err("no text");
    assert_eq!((error.code.as_ref(), error.params[0].as_str()), ("FIELD_TYPE_ERROR", "value"));
    assert_eq!(admin.code("pool.get_record", vec![NULL_REF.into()]), "HANDLE_INVALID");
    assert_eq!(admin.code("VDI.get_record", vec![pool()]), "HANDLE_INVALID");
    assert_eq!(admin.code("VDI.get_by_uuid", vec!["x".into()]), "UUID_INVALID");
    let gone = Value::from("OpaqueRef:2b4bc1d8-8ef3-4d40-8b22-a6b4b2d9d2a1");
    let error = admin.try_call("pool.set_default_SR", vec![pool(), gone]).expect_err("no such SR");
    assert_eq!((error.code.as_ref(), error.params[0].as_str()), ("HANDLE_INVALID", "SR"));
    let error =
        stack.call(&Peer::default(), "pool.get_all", vec!["OpaqueRef:x".into()]).expect_err("no session");
    assert_eq!(
        (error.code.as_ref(), error.params.as_slice()),
        ("SESSION_INVALID", &["OpaqueRef:x".to_owned()][..])
    );
    let error = stack.call(&Peer::default(), "pool.get_all", vec![]).expect_err("no session at all");
    assert_eq!(error.code, "MESSAGE_PARAMETER_COUNT_MISMATCH");
    assert_eq!(
        admin.code("message.create", vec!["n".into(), "1".into(), "Moon".into(), "u".into(), "b".into()]),
        "VALUE_NOT_SUPPORTED"
    );
}

#[test]
fn every_listed_message_has_a_handler_and_every_handler_is_listed() {
    let (_dir, stack) = stack();
    let unreachable = stack.methods.unreachable(&stack.handlers);
    assert!(unreachable.is_empty(), "handlers without a message in the table: {unreachable:?}");
    let listed =
        texts(&stack.call(&Peer::default(), "system.listMethods", vec![]).expect("no session is needed"));
    for name in
        ["VDI.get_all_records", "session.login_with_password", "event.from", "pool.get_all_records_where"]
    {
        assert!(listed.iter().any(|listed| listed == name), "{name}");
    }
    for undone in stack.methods.undone() {
        assert!(!listed.iter().any(|listed| listed == undone), "{undone} is listed and does nothing");
    }
}

#[test]
fn queries_find_by_fields() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let (one, two) = (admin.vm("one"), admin.vm("it's \"two\""));
    stack.db.set("VM", &two, "ha_always_run", true).expect("a field");
    stack.db.set("VM", &two, "tags", Value::strings(["x", "y"])).expect("a field");
    let find = |expr: &str| {
        let mut found: Vec<String> =
            map(&admin.call("VM.get_all_records_where", vec![expr.into()])).keys().cloned().collect();
        found.sort();
        found
    };
    let both = || {
        let mut both = vec![one.clone(), two.clone()];
        both.sort();
        both
    };
    let all_of_us = r#"field "name__label" = "one" or field "ha_always_run" = "true""#;
    assert_eq!(find(all_of_us), both());
    assert_eq!(find(r#"field "name__label" = "one""#), [one.as_str()]);
    assert_eq!(find(r#""one" = field 'name_label'"#), [one.as_str()]);
    assert_eq!(find(r#"field "name_label" = "it's \"two\"""#), [two.as_str()]);
    assert_eq!(find(r#"field "tags" = "('x' 'y')""#), [two.as_str()]);
    assert_eq!(find(&format!(r#"({all_of_us}) and not (field "ha_always_run" = "true")"#)), [one.as_str()]);
    assert_eq!(find(&format!(r#"field "_ref" = "{two}""#)), [two.as_str()]);
    assert_eq!(find(r#"true and (false or field "uuid" = "x")"#), Vec::<String>::new());
    let found = texts(&admin.call("VM.get_all_where", vec![r#"field "name_label" = "one""#.into()]));
    assert_eq!(found, [one]);
    for broken in [
        "",
        "(",
        "true true",
        "field = \"x\"",
        "field \"no_such\" = \"x\"",
        "\"x",
        "a = b",
        "not",
        &"(".repeat(9000),
    ] {
        assert_eq!(
            admin.code("VM.get_all_records_where", vec![broken.into()]),
            "VALUE_NOT_SUPPORTED",
            "{broken}"
        );
    }
}

#[test]
fn objects_are_made_from_records() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let record =
        Value::Map([("value", "pw"), ("nonsense", "x")].map(|(k, v)| (k.to_owned(), v.into())).into());
    let secret = admin.call("secret.create", vec![record]);
    assert_eq!(text(&admin.call("secret.get_value", vec![secret.clone()])), "pw");
    let empty = Value::Map([].into());
    let error = admin.try_call("secret.create", vec![empty]).expect_err("a value is needed");
    assert_eq!((error.code.as_ref(), error.params[0].as_str()), ("FIELD_TYPE_ERROR", "value"));
    admin.call("secret.destroy", vec![secret.clone()]);
    assert_eq!(admin.code("secret.get_value", vec![secret]), "HANDLE_INVALID");
}

#[test]
fn inverse_fields_follow() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let vm = admin.vm("vm");
    let fields = needed("VBD", &[("VM", vm.as_str().into()), ("userdevice", "0".into())]);
    let vbd = stack.db.create("VBD", &fields).expect("a VBD");
    assert_eq!(texts(&admin.call("VM.get_VBDs", vec![vm.as_str().into()])), [vbd.as_str()]);
    stack.db.destroy("VBD", &vbd).expect("it is there");
    assert!(texts(&admin.call("VM.get_VBDs", vec![vm.into()])).is_empty());
}

#[test]
fn this_host_and_its_networks_are_there() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "read-only");
    let hosts = admin.call("host.get_all_records", vec![]);
    assert_eq!(map(&hosts).len(), 1);
    let host = map(map(&hosts).values().next().expect("one host"));
    assert_eq!(host["API_version_major"], Value::Int(2));
    assert!(!text(&host["address"]).is_empty());
    assert!(map(&host["cpu_info"])["cpu_count"] != Value::from("0"));
    assert!(!texts(&host["host_CPUs"]).is_empty());
    let metrics = admin.call("host_metrics.get_record", vec![host["metrics"].clone()]);
    assert!(map(&metrics)["memory_total"].as_int() > Some(0));
    let networks = admin.call("network.get_all_records", vec![]);
    let pifs = admin.call("PIF.get_all_records", vec![]);
    assert_eq!(map(&networks).len(), map(&pifs).len());
    for pif in map(&pifs).values() {
        assert!(map(&networks).contains_key(&text(&map(pif)["network"])));
    }
    let again = tapio_core::Toolstack::start(&stack);
    again.expect("a second start changes nothing");
    assert_eq!(admin.call("network.get_all", vec![]), Value::strings(map(&networks).keys().cloned()));
}
