use std::os::unix::fs::PermissionsExt;

use super::*;

#[test]
fn a_first_start_makes_a_certificate_that_stays() {
    let dir = tempfile::tempdir().expect("a directory");
    let (first, made) = Certificates::open_or_make(dir.path()).expect("made");
    assert!(made);
    let mode = fs::metadata(dir.path().join(FILE)).expect("the file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let (second, made) = Certificates::open_or_make(dir.path()).expect("opened");
    assert!(!made);
    assert_eq!(first.fingerprint(), second.fingerprint());
    assert_eq!(first.fingerprint().len(), 95);
    first.config().expect("a configuration");
    let span = validity::of(first.current().end_entity_cert().expect("a certificate")).expect("dates");
    assert_eq!(span.not_after - span.not_before, TEN_YEARS + 86_400);
    assert!(names::of_this_host().contains(&"127.0.0.1".to_owned()));
}

#[test]
fn ones_own_is_checked_and_takes_effect_when_read_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let (certificates, _) = Certificates::open_or_make(dir.path()).expect("made");
    let before = certificates.fingerprint();
    let other = self_signed(&["disks.example".to_owned()]).expect("made");
    let (cert, key) = other.split_at(other.find("-----BEGIN PRIVATE").expect("a key"));
    let (cert_path, key_path) = (dir.path().join("c"), dir.path().join("k"));
    fs::write(&cert_path, cert).expect("written");
    fs::write(&key_path, key).expect("written");
    let fingerprint = install(dir.path(), &cert_path, &key_path).expect("installed");
    assert_eq!(certificates.fingerprint(), before);
    certificates.reload().expect("read again");
    assert_eq!(certificates.fingerprint(), fingerprint);

    // Nothing wrong is installed, and nothing wrong that was put there by hand replaces what works.
    let third = self_signed(&["x".to_owned()]).expect("made");
    let foreign = &third[third.find("-----BEGIN PRIVATE").expect("a key")..];
    for (cert_text, key_text, says) in [
        (cert, foreign, "not the certificate's"),
        ("", key, "no certificate"),
        (cert, "", "no key"),
        (cert, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "c with"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", key, "dates"),
    ] {
        fs::write(&cert_path, cert_text).expect("written");
        fs::write(&key_path, key_text).expect("written");
        let said = install(dir.path(), &cert_path, &key_path).expect_err(says);
        assert!(said.contains(says) && said.contains(dir.path().to_str().expect("UTF-8")), "{said}");
    }
    assert!(
        install(dir.path(), &dir.path().join("absent"), &key_path).expect_err("absent").contains("absent")
    );
    fs::write(dir.path().join(FILE), "nonsense").expect("written");
    assert!(certificates.reload().expect_err("nonsense").contains("--install-certificate"));
    assert_eq!(certificates.fingerprint(), fingerprint);
    assert!(Certificates::open_or_make(dir.path()).is_err());
}

fn dated(from: i64, to: i64) -> String {
    let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).expect("a key");
    let mut params = CertificateParams::new(vec!["x".to_owned()]).expect("params");
    let at = |seconds: i64| {
        let base = std::time::SystemTime::UNIX_EPOCH;
        base + std::time::Duration::from_secs(seconds.unsigned_abs())
    };
    (params.not_before, params.not_after) = (at(from).into(), at(to).into());
    let cert = params.self_signed(&key).expect("signed");
    format!("{}{}", cert.pem(), key.serialize_pem())
}

#[test]
fn dates_count() {
    let (past, y2060) = (1_500_000_000, 2_840_140_800);
    assert!(
        check(dated(past, past + 1).as_bytes())
            .expect_err("over")
            .to_string()
            .contains("ended on 20170714T02:40:01Z")
    );
    assert!(
        check(dated(y2060, y2060 + 1).as_bytes()).expect_err("early").to_string().contains("begins on 2060")
    );
    check(dated(past, y2060).as_bytes()).expect("valid");
}

#[test]
fn damaged_certificates_have_no_dates_and_do_no_harm() {
    let pem = dated(1_500_000_000, 2_840_140_800);
    let whole = CertificateDer::from_pem_slice(pem.as_bytes()).expect("a certificate");
    for len in 0..whole.len() {
        let _ = validity::of(&whole[..len]);
        let mut changed = whole.to_vec();
        changed[len] ^= 0xff;
        let _ = validity::of(&changed);
    }
    assert_eq!(validity::of(&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff]), None);
}

#[test]
fn a_client_installs_a_certificate_with_its_chain_and_goes_back_to_a_made_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let (certificates, _) = Certificates::open_or_make(dir.path()).expect("made");
    let before = certificates.fingerprint();
    let [own, above] = [(); 2].map(|()| self_signed(&["x".to_owned()]).expect("made"));
    let ((cert, key), (authority, other_key)) = (shared::split(&own), shared::split(&above));
    for (cert, chain, key, wrong) in [
        (&*cert, "", &*other_key, Wrong::Mismatch),
        (&cert, &key, &key, Wrong::Chain("there is no certificate in the chain".into())),
    ] {
        assert_eq!(certificates.install(cert, chain, key), Err(wrong));
    }
    assert!(matches!(certificates.install("", "", &key), Err(Wrong::Certificate(_))));
    assert!(matches!(certificates.install(&cert, "", &cert), Err(Wrong::Key(_))));
    let long = authority.repeat(600);
    assert!(matches!(certificates.install(&cert, &long, &key), Err(Wrong::Certificate(_))), "{}", long.len());
    assert_eq!(certificates.fingerprint(), before);
    certificates.install(&cert, &authority, &key).expect("installed");
    assert_eq!(certificates.pem().expect("its file"), format!("{cert}{authority}"), "and no key");
    let installed = certificates.fingerprint();
    certificates.reload().expect("what it shows is in the file");
    assert_eq!(certificates.fingerprint(), installed);
    certificates.renew().expect("made");
    assert!(![before, installed].contains(&certificates.fingerprint()));
}
