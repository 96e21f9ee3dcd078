//! TLS: our client and other people's against our server.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tapio_block::{Disk, DiskOptions};
use tapio_fixtures::certificates::{keys, make};
use tapio_front::nbd::client::{Address, ClientError, ClientOptions, Haggle};
use tapio_front::nbd::tls::{TlsClient, TlsFiles, TlsOptions, TlsPolicy, TlsServer};
use tapio_front::nbd::wire::{Style, option, option_reply};
use tapio_front::nbd::{Export, NbdServer};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};

use super::tools::{good, installed, tool};
use super::{Rig, TIMEOUT, pattern};

/// An authority, and certificates that it signed: of a server on this host, and of a client.
fn certificates(dir: &Path, client: bool) {
    make(dir, client, "IP:127.0.0.1,DNS:localhost", 30);
}

struct Secured {
    rig: Rig,
    _server: NbdServer,
    address: SocketAddr,
}

fn files(dir: Option<&Path>, psk: Option<&Path>) -> TlsFiles {
    TlsFiles { dir: dir.map(Path::to_path_buf), psk: psk.map(Path::to_path_buf) }
}

impl Secured {
    fn new(files: &TlsFiles, policy: TlsPolicy, verify_peer: bool) -> Self {
        let rig = Rig::new(16 << 20);
        let tls = TlsServer::load(files, policy, verify_peer, |line| println!("{line}")).unwrap();
        let server = NbdServer::with_tls(Some(tls)).unwrap();
        server.add_export(Export::new("disk", rig.disk.remote().clone())).unwrap();
        let (_, address) = server.listen_tcp(([127, 0, 0, 1], 0).into()).unwrap();
        Self { rig, _server: server, address }
    }

    fn haggle(&self) -> Haggle {
        Haggle::begin(&Address::Tcp(self.address), TIMEOUT).unwrap()
    }

    fn client(&self, files: TlsFiles, user: Option<&str>) -> Result<(), String> {
        let options = TlsOptions { files, user: user.map(str::to_owned), hostname: None };
        let tls = TlsClient::load(&options, "127.0.0.1").map_err(|error| error.to_string())?;
        let secured = self.haggle().start_tls(&tls).map_err(|error| error.to_string())?;
        let mut client =
            secured.go(&ClientOptions::all("disk"), TIMEOUT).map_err(|error| error.to_string())?;
        assert_eq!(client.style(), Style::Extended);
        let bytes = pattern(9, 3 << 20);
        client.write(4096, &bytes, true).map_err(|error| error.to_string())?;
        assert!(client.read(4096, 3 << 20).unwrap() == bytes);
        client.disconnect().map_err(|error| error.to_string())
    }

    fn uri(&self, user: &str, query: &str) -> String {
        format!("nbds://{user}{}/disk?{query}", self.address)
    }
}

fn dir(name: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    (dir, path)
}

#[test]
fn certificates_let_in_clients_that_check_them() {
    if !installed("openssl") {
        return;
    }
    let (_kept, pki) = dir("pki");
    certificates(&pki, false);
    let secured = Secured::new(&files(Some(&pki), None), TlsPolicy::Required, false);
    secured.client(files(Some(&pki), None), None).unwrap();
    let uri = secured.uri("", &format!("tls-certificates={}", pki.display()));
    if let Some(text) = good("nbdinfo", &[&uri]) {
        assert!(text.contains("protocol: newstyle-fixed with TLS"), "{text}");
    }
    // The authority of a stranger.
    let other = pki.with_extension("other");
    certificates(&other, false);
    let error = secured.client(files(Some(&other), None), None).unwrap_err();
    assert!(error.contains("not signed by the authority"), "{error}");
    // A directory that is not there.
    let error = secured.client(files(Some(&pki.with_extension("none")), None), None).unwrap_err();
    assert!(error.contains("no such directory"), "{error}");
    fs::remove_file(other.join("ca-cert.pem")).unwrap();
    let error = secured.client(files(Some(&other), None), None).unwrap_err();
    assert!(error.contains("ca-cert.pem"), "{error}");
    fs::write(other.join("ca-cert.pem"), "no certificate").unwrap();
    let error = secured.client(files(Some(&other), None), None).unwrap_err();
    assert!(error.contains("ca-cert.pem") && error.contains("no certificate"), "{error}");
}

#[test]
fn expired_and_foreign_certificates_of_servers_are_refused_with_the_reason() {
    if !installed("openssl") {
        return;
    }
    for (names, days, why) in
        [("IP:127.0.0.1", -1, "expired"), ("DNS:elsewhere.example", 30, "for another host")]
    {
        let (_kept, pki) = dir("pki");
        make(&pki, false, names, days);
        let secured = Secured::new(&files(Some(&pki), None), TlsPolicy::Required, false);
        let error = secured.client(files(Some(&pki), None), None).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn clients_need_a_certificate_where_that_is_asked_for() {
    if !installed("openssl") {
        return;
    }
    let (_kept, pki) = dir("pki");
    certificates(&pki, true);
    let secured = Secured::new(&files(Some(&pki), None), TlsPolicy::Required, true);
    secured.client(files(Some(&pki), None), None).unwrap();
    let uri = secured.uri("", &format!("tls-certificates={}", pki.display()));
    good("nbdinfo", &["--size", &uri]);
    // Without one.
    let bare = pki.with_extension("bare");
    fs::create_dir(&bare).unwrap();
    fs::copy(pki.join("ca-cert.pem"), bare.join("ca-cert.pem")).unwrap();
    let error = secured.client(files(Some(&bare), None), None).unwrap_err();
    assert!(error.contains("requires a certificate"), "{error}");
    if let Some((ok, _)) =
        tool("nbdinfo", &[&secured.uri("", &format!("tls-certificates={}", bare.display()))])
    {
        assert!(!ok);
    }
    // With one that another authority has signed.
    let other = pki.with_extension("other");
    certificates(&other, true);
    fs::copy(pki.join("ca-cert.pem"), other.join("ca-cert.pem")).unwrap();
    let error = secured.client(files(Some(&other), None), None).unwrap_err();
    assert!(error.contains("TLS"), "{error}");
}

#[test]
fn keys_let_in_clients_that_have_them() {
    let (_kept, path) = dir("keys.psk");
    keys(&path, "alice", "a");
    let secured = Secured::new(&files(None, Some(&path)), TlsPolicy::Required, false);
    secured.client(files(None, Some(&path)), None).unwrap();
    secured.client(files(path.parent(), None), Some("alice")).unwrap();
    let query = format!("tls-psk-file={}", path.display());
    if let Some(text) = good("nbdinfo", &[&secured.uri("alice@", &query)]) {
        assert!(text.contains("protocol: newstyle-fixed with TLS"), "{text}");
    }
    let wrong = path.with_extension("wrong");
    for (user, digit) in [("alice", "b"), ("mallory", "a")] {
        keys(&wrong, user, digit);
        let error = secured.client(files(None, Some(&wrong)), None).unwrap_err();
        assert!(error.contains("TLS") && error.contains("keys differ"), "{error}");
        let query = format!("tls-psk-file={}", wrong.display());
        if let Some((ok, _)) = tool("nbdinfo", &[&secured.uri(&format!("{user}@"), &query)]) {
            assert!(!ok);
        }
    }
    let error = secured.client(files(None, Some(&path)), Some("bob")).unwrap_err();
    assert!(error.contains("no key of user 'bob'"), "{error}");
}

#[test]
fn data_survives_other_peoples_clients() {
    if !installed("nbdcopy") || !installed("openssl") {
        return;
    }
    let (_kept, pki) = dir("pki");
    certificates(&pki, false);
    let psk = pki.join("alice.psk");
    keys(&psk, "alice", "c");
    for (server, user, query) in [
        (files(Some(&pki), None), "", format!("tls-certificates={}", pki.display())),
        (files(None, Some(&psk)), "alice@", format!("tls-psk-file={}", psk.display())),
    ] {
        let secured = Secured::new(&server, TlsPolicy::Required, false);
        let (original, copy) = (pki.join("original"), pki.join("copy"));
        fs::write(&original, pattern(5, 16 << 20)).unwrap();
        let uri = secured.uri(user, &query);
        good("nbdcopy", &["--connections=4", "--flush", original.to_str().unwrap(), &uri]);
        good("nbdcopy", &[&uri, copy.to_str().unwrap()]);
        assert!(fs::read(&original).unwrap() == fs::read(&copy).unwrap());
        assert!(secured.rig.image(0, 16 << 20) == fs::read(&original).unwrap());
    }
}

#[test]
fn qemu_reaches_the_disk_both_ways() {
    if !installed("qemu-io") || !installed("openssl") {
        return;
    }
    let (_kept, pki) = dir("pki");
    certificates(&pki, true);
    // QEMU names the file of keys by its directory.
    let psk_dir = pki.join("psk");
    fs::create_dir(&psk_dir).unwrap();
    let psk = psk_dir.join("keys.psk");
    keys(&psk, "qemu", "d");
    let by_certificate = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", pki.display());
    let by_key = format!("tls-creds-psk,id=tls0,endpoint=client,username=qemu,dir={}", psk_dir.display());
    for (server, verify, credentials) in
        [(files(Some(&pki), None), true, by_certificate), (files(Some(&psk_dir), None), false, by_key)]
    {
        let secured = Secured::new(&server, TlsPolicy::Required, verify);
        let image = format!(
            "driver=nbd,server.type=inet,server.host=127.0.0.1,server.port={},export=disk,tls-creds=tls0",
            secured.address.port()
        );
        let args = ["--object", &credentials, "--image-opts", &image];
        let commands = ["-c", "write -P 7 1M 2M", "-c", "flush", "-c", "read -P 7 1M 2M"];
        good("qemu-io", &[&args[..], &commands].concat());
        assert!(secured.rig.image(1 << 20, 2 << 20).iter().all(|byte| *byte == 7));
    }
}

#[test]
fn without_tls_one_is_told_so_or_stays_as_configured() {
    let (_kept, path) = dir("keys.psk");
    keys(&path, "alice", "a");
    let required = Secured::new(&files(None, Some(&path)), TlsPolicy::Required, false);
    let refused = required.haggle().go(&ClientOptions::all("disk"), TIMEOUT).unwrap_err();
    match refused {
        ClientError::Option { option, reply, .. } => {
            assert_eq!((option, reply), (option::GO, option_reply::ERR_TLS_REQD));
        }
        other => panic!("{other}"),
    }
    assert!(required.haggle().list().is_err());
    assert!(required.haggle().abort().is_ok());
    let offered = Secured::new(&files(None, Some(&path)), TlsPolicy::Offered, false);
    offered.haggle().go(&ClientOptions::all("disk"), TIMEOUT).unwrap().disconnect().unwrap();
    offered.client(files(None, Some(&path)), None).unwrap();
    // And a server without it says that it has none.
    let rig = Rig::new(1 << 20);
    let options = TlsOptions { files: files(None, Some(&path)), ..TlsOptions::default() };
    let tls = TlsClient::load(&options, "localhost").unwrap();
    let error = Haggle::begin(&rig.address(), TIMEOUT).unwrap().start_tls(&tls).unwrap_err().to_string();
    assert!(error.contains("offers no TLS") && error.contains("not configured"), "{error}");
}

#[test]
fn a_disk_on_a_secured_export_reconnects() {
    let (_kept, path) = dir("keys.psk");
    keys(&path, "alice", "e");
    let secured = Secured::new(&files(None, Some(&path)), TlsPolicy::Required, false);
    let name = format!(
        "nbds://alice@{}/disk?tls-psk-file={}&connections=2&unflushed=keep",
        secured.address,
        path.display()
    );
    let layers = vec![LayerSpec { kind: ImageKind::Nbd, path: PathBuf::from(name) }];
    let spec = ChainSpec { layers, access: Access::ReadWrite };
    let disk = Disk::start(spec, DiskOptions::default()).unwrap();
    let server = NbdServer::new().unwrap();
    server.add_export(Export::new("upper", disk.remote().clone())).unwrap();
    let socket = secured.rig.socket.with_extension("upper");
    server.listen_unix(&socket, 0o600).unwrap();
    let options = ClientOptions::all("upper");
    let mut client =
        tapio_front::nbd::client::Client::connect(&Address::Unix(socket), &options, TIMEOUT).unwrap();
    for round in 0..8u64 {
        let bytes = pattern(round, 1 << 20);
        client.write(round << 20, &bytes, false).unwrap();
        for connection in secured._server.connections() {
            secured._server.close_connection(connection.id);
        }
        assert!(client.read(round << 20, 1 << 20).unwrap() == bytes);
    }
    client.flush().unwrap();
    client.disconnect().unwrap();
    server.close();
    disk.close(TIMEOUT).unwrap();
}

#[test]
fn a_client_that_stalls_or_babbles_before_tls_costs_a_while_and_no_more() {
    use std::io::{Read, Write};
    let (_kept, path) = dir("keys.psk");
    keys(&path, "alice", "f");
    let secured = Secured::new(&files(None, Some(&path)), TlsPolicy::Required, false);
    // Says it, and waits for the end, as long as that takes.
    let ends_after = |said: &[u8]| {
        let mut stream = std::net::TcpStream::connect(secured.address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        let ask = [&0x4948_4156_454f_5054u64.to_be_bytes()[..], &5u32.to_be_bytes(), &[0; 4]].concat();
        stream.write_all(&ask).unwrap();
        stream.read_exact(&mut [0; 20]).unwrap();
        stream.write_all(said).unwrap();
        let begin = Instant::now();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        begin.elapsed()
    };
    for said in [&b"GET / HTTP/1.0\r\n\r\n"[..], &[22, 3, 1, 0xff, 0xff], &[0; 5000]] {
        // A handshake's deadline is ten seconds. One that ends with it was waited for, or the host is busy.
        assert!((0..5).any(|_| ends_after(said) < Duration::from_secs(9)), "{said:?} is still there");
    }
    secured.client(files(None, Some(&path)), None).unwrap();
}
