use super::super::refusal::status_of;
use super::*;
use tapio_model::Asked;

const UUID: &str = "5b12bd4a-6f3a-4a6f-9a5a-2d6e3b5f0c11";

fn wanted(direction: Direction, query: &str, headers: &[(&str, &str)]) -> Wanted {
    let mut request = Request::builder().uri(format!("/import_raw_vdi/?{query}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    read(direction, &request.body(()).expect("a request"))
}

#[test]
fn paths_are_taken_with_and_without_a_slash() {
    assert_eq!(direction(&Method::GET, "/export_raw_vdi/"), Some(Direction::Export));
    assert_eq!(direction(&Method::PUT, "/import_raw_vdi"), Some(Direction::Import));
    assert_eq!(direction(&Method::PUT, "/export_raw_vdi"), None);
    assert_eq!(direction(&Method::GET, "/export_raw_vdix"), None);
}

#[test]
fn an_export_is_what_its_query_and_headers_say() {
    let query = format!("session_id=OpaqueRef%3A1&task_id=OpaqueRef:2&vdi={UUID}&format=vhd&base=b");
    let wanted = wanted(Direction::Export, &query, &[("range", "bytes=512-"), ("if-match", "\"x\"")]);
    assert_eq!(
        (wanted.credentials.session.as_deref(), wanted.task.as_deref()),
        (Some("OpaqueRef:1"), Some("OpaqueRef:2"))
    );
    let (base, format) = (Some("b".to_owned()), ImageFormat::Vhd);
    assert_eq!(wanted.asked, Ok(Asked::Export { vdi: UUID.to_owned(), base, format, start: 512 }));
    assert_eq!(wanted.condition, request::Condition { start: 512, matches: Some("\"x\"".to_owned()) });
    for range in ["bytes=0-99", "bytes=-5", "lines=3-", "bytes=5-9,11-"] {
        assert_eq!(super::tests::wanted(Direction::Export, &query, &[("range", range)]).condition.start, 0);
    }
}

#[test]
fn a_session_comes_in_a_cookie_and_an_account_in_a_header() {
    let headers = [("cookie", "session_id=s; task_id=t"), ("authorization", "Basic YWxpY2U6YTpi")];
    let wanted = wanted(Direction::Export, "vdi=v", &headers);
    assert_eq!((wanted.credentials.session.as_deref(), wanted.task.as_deref()), (Some("s"), Some("t")));
    assert_eq!(wanted.credentials.account, Some(("alice".to_owned(), "a:b".to_owned())));
}

#[test]
fn what_is_asked_for_wrongly_has_the_status_that_clients_know() {
    use Direction::{Export, Import};
    let len = ("content-length", "512");
    type Case<'a> = (Direction, &'a str, &'a [(&'a str, &'a str)], u16, &'a str);
    let cases: [Case<'_>; 10] = [
        (Export, "vdi=v&format=qcow2", &[], 404, "INTERNAL_ERROR"),
        (Export, "format=raw", &[], 400, "VDI_MISSING"),
        (Export, "vdi=v&base=b", &[], 400, "INTERNAL_ERROR"),
        (Import, "vdi=v", &[("transfer-encoding", "chunked")], 403, "IMPORT_ERROR_CANNOT_HANDLE_CHUNKED"),
        (Import, "vdi=v&format=vhd&chunked", &[len], 404, "INTERNAL_ERROR"),
        (Import, "vdi=v&format=tar", &[len], 404, "INTERNAL_ERROR"),
        (Import, "", &[len], 400, "VDI_MISSING"),
        (Import, "sr_id=s&format=vhd", &[len], 400, "INTERNAL_ERROR"),
        (Import, "sr_id=s", &[("content-length", "1125899906842624")], 400, "INTERNAL_ERROR"),
        (Import, "vdi=v", &[len, ("content-range", "bytes 0-9/10")], 400, "INTERNAL_ERROR"),
    ];
    for (direction, query, headers, status, code) in cases {
        let wanted = wanted(direction, query, headers);
        let error = wanted.asked.expect_err(query);
        let told = wanted.status.unwrap_or_else(|| status_of(&error.code));
        assert_eq!((told.as_u16(), &*error.code), (status, code), "{query}");
    }
}

#[test]
fn lengths_without_a_meaning_are_none() {
    let asked = |query: &str, headers: &[(&str, &str)]| wanted(Direction::Import, query, headers).asked;
    let import = |start, len| {
        let (vdi, sr) = (Some("v".to_owned()), None);
        Ok(Asked::Import { vdi, sr, format: ImageFormat::Raw, start, len })
    };
    assert_eq!(asked("vdi=v", &[("content-length", "1125899906842624")]), import(0, None));
    assert_eq!(asked("vdi=v", &[("content-length", "7")]), import(0, Some(7)));
    let part = [("content-length", "10"), ("content-range", "bytes 512-521/522")];
    assert_eq!(asked("vdi=v", &part), import(512, Some(10)));
    assert_eq!(asked("vdi=v", &[]), Ok(Asked::Probe { vdi: Some("v".to_owned()) }));
    let early = Err(ApiError::bare("IMPORT_ERROR_PREMATURE_EOF"));
    assert_eq!(asked("vdi=v&task_id=t", &[]), early);
    // Without a length and a task nothing but its bytes says that a request has an image.
    let pib = ("content-length", "1125899906842624");
    for (query, header, expected) in
        [("vdi=v", pib, true), ("vdi=v&task_id=t", pib, false), ("vdi=v", ("content-length", "7"), false)]
    {
        assert_eq!(wanted(Direction::Import, query, &[header]).may_be_probe, expected, "{query} {header:?}");
    }
}
