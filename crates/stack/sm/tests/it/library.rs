//! A directory of ISO images.

use tapio_sm::{Config, ForkKind};
use tapio_types::Access;
use uuid::Uuid;

use crate::support::{Place, Watch, new_vdi};

fn code<T>(result: Result<T, tapio_types::ApiError>) -> String {
    result.map(|_| ()).unwrap_err().code.to_string()
}

#[test]
fn images_are_read_only_vdis_with_their_names() {
    let place = Place::new();
    let ctx = Watch::default();
    let driver = place.driver("iso");
    std::fs::create_dir(place.images()).unwrap();
    for name in ["debian 12.iso", "tools.IMG", "notes.txt", ".iso"] {
        std::fs::write(place.images().join(name), vec![3; 5000]).unwrap();
    }
    std::fs::create_dir(place.images().join("dir.iso")).unwrap();
    assert_eq!(code(driver.attach(&ctx, place.sr, &place.config)), "SR_BACKEND_FAILURE_226");
    let mut config = place.config.clone();
    config.insert("legacy_mode".into(), "true".into());
    driver.create(&ctx, place.sr, &config, 0).unwrap();
    let probed = driver.probe(&ctx, &config).unwrap();
    assert_eq!(probed.results[0].extra_info["images"], "2");
    let sr = driver.attach(&ctx, place.sr, &config).unwrap();
    let found = sr.scan(&ctx).unwrap();
    let labels: Vec<_> = found.iter().map(|info| info.name_label.as_deref().unwrap()).collect();
    assert_eq!(labels, ["debian 12.iso", "tools.IMG"]);
    let iso = &found[0];
    assert!(iso.read_only && iso.managed && iso.virtual_size == 5120 && iso.location == "debian 12.iso");
    assert_eq!(sr.vdi(&ctx, iso.uuid).unwrap(), *iso);
    assert_eq!(sr.stat(&ctx).unwrap().virtual_allocation, 2 * 5120);
    let chain = sr.activate(&ctx, iso.uuid, Access::ReadOnly).unwrap().chain;
    assert!(chain.layers[0].path.ends_with("debian 12.iso"));
    sr.deactivate(&ctx, iso.uuid).unwrap();
    assert_eq!(code(sr.activate(&ctx, iso.uuid, Access::ReadWrite)), "VDI_READONLY");
    assert_eq!(code(sr.activate(&ctx, Uuid::nil(), Access::ReadOnly)), "VDI_MISSING");
    assert_eq!(code(sr.create(&ctx, &new_vdi(512, "raw"))), "SR_BACKEND_FAILURE_38");
    assert_eq!(code(sr.destroy(&ctx, iso.uuid)), "SR_BACKEND_FAILURE_38");
    assert_eq!(code(sr.resize(&ctx, iso.uuid, 9999)), "SR_BACKEND_FAILURE_38");
    assert_eq!(code(sr.fork(&ctx, iso.uuid, Uuid::new_v4(), ForkKind::Clone)), "SR_BACKEND_FAILURE_38");
    assert_eq!(code(sr.fill(&ctx, iso.uuid, &chain, None)), "SR_BACKEND_FAILURE_38");
    assert_eq!(sr.introduce(&ctx, iso.uuid, "debian 12.iso").unwrap().uuid, iso.uuid);
    assert_eq!(code(sr.introduce(&ctx, Uuid::new_v4(), "debian 12.iso")), "SR_BACKEND_FAILURE_46");
    assert_eq!(code(sr.introduce(&ctx, iso.uuid, "notes.txt")), "SR_BACKEND_FAILURE_221");
    // A file that goes is no VDI; a directory that goes is an error.
    std::fs::remove_file(place.images().join("tools.IMG")).unwrap();
    assert_eq!(sr.scan(&ctx).unwrap().len(), 1);
    std::fs::remove_dir_all(place.images()).unwrap();
    assert_eq!(code(sr.scan(&ctx)), "SR_BACKEND_FAILURE_47");
    sr.erase(&ctx).map_err(|(_, error)| error).unwrap();
}

#[test]
fn locations_that_are_none_are_refused() {
    let place = Place::new();
    let ctx = Watch::default();
    let driver = place.driver("iso");
    let attach = |pairs: &[(&str, &str)]| {
        let config: Config = pairs.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        code(driver.attach(&ctx, place.sr, &config))
    };
    assert_eq!(attach(&[]), "SR_BACKEND_FAILURE_220");
    assert_eq!(
        attach(&[("location", "127.0.0.1:/isos"), ("options", "soft,timeo=1")]),
        "SR_BACKEND_FAILURE_222"
    );
    assert_eq!(attach(&[("location", "/isos"), ("type", "cifs")]), "SR_BACKEND_FAILURE_225");
    assert_eq!(attach(&[("location", "//x/y"), ("type", "zfs")]), "SR_BACKEND_FAILURE_1");
    assert_eq!(attach(&[("location", "isos"), ("legacy_mode", "true")]), "SR_BACKEND_FAILURE_225");
    assert_eq!(attach(&[("location", "/no/such/place"), ("legacy_mode", "true")]), "SR_BACKEND_FAILURE_226");
}
