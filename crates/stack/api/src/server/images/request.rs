//! What a request for a disk says.

use hyper::header::{CONTENT_LENGTH, CONTENT_RANGE, IF_MATCH, IF_RANGE, RANGE, TRANSFER_ENCODING};
use hyper::{Request, StatusCode};
use tapio_model::{ApiError, ArchiveCompression, Asked, ImageFormat, TransferPlace};

use super::super::credentials::{Credentials, Params, header};
use super::Direction;

/// Clients that do not know how much they will send announce 1 PiB, and close the connection behind the last byte.
const LEN_UNKNOWN: u64 = 1 << 50;

/// Which part of an export is wanted, and of which disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Condition {
    /// The first byte.
    pub(super) start: u64,
    /// The tag that it must have.
    pub(super) matches: Option<String>,
}

/// What a request says.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) credentials: Credentials,
    pub(super) task: Option<String>,
    /// What decides the host that does it; none of what any host does.
    pub(super) place: Option<TransferPlace>,
    pub(super) asked: Result<Asked, ApiError>,
    /// Of an export.
    pub(super) format: Option<ImageFormat>,
    /// The status of what `asked` has against it, where its code has another one.
    pub(super) status: Option<StatusCode>,
    pub(super) condition: Condition,
    /// The answer is to come before the image: a client waits for it.
    pub(super) early: bool,
    /// An import without a length and a task: the client may only be looking for a redirection, and send no body.
    pub(super) may_be_probe: bool,
}

type Refused = (ApiError, Option<StatusCode>);

fn wrong(status: StatusCode, why: impl std::fmt::Display) -> Refused {
    (ApiError::internal(why), Some(status))
}

/// Reads a request.
pub(super) fn read<B>(direction: Direction, request: &Request<B>) -> Wanted {
    let params = Params::of(request);
    let condition = if direction == Direction::Export { condition(request) } else { Condition::default() };
    let asked = match direction {
        Direction::Export => export(&params, condition.start),
        Direction::Import => import(request, &params),
        Direction::ExportVm => export_vm(&params),
        Direction::ImportVm => import_vm(request, &params),
        Direction::ExportMetadata => export_metadata(&params),
        Direction::ImportMetadata => import_metadata(request, &params),
        Direction::Memory => memory(&params),
        Direction::ExportDatabase => Ok(Asked::ExportDatabase),
        Direction::ImportDatabase => Ok(Asked::ImportDatabase {
            dry_run: is_true(&params, "dry_run"),
            force: is_true(&params, "force"),
        }),
        Direction::ExportHost => Ok(Asked::ExportHost),
        Direction::ImportHost => {
            Ok(Asked::ImportHost { dry_run: is_true(&params, "dry_run"), force: is_true(&params, "force") })
        }
    };
    let format = match &asked {
        Ok(Asked::Export { format, .. }) => Some(*format),
        _ => None,
    };
    let is_import = matches!(asked, Ok(Asked::Import { .. } | Asked::ImportVm { .. }));
    // A host that sends a part of a disk looks for nothing.
    let is_sure = params.get("task_id").is_some() || params.has("part");
    let may_be_probe = is_import && !is_sure && body_len(request) >= LEN_UNKNOWN;
    let status = asked.as_ref().err().and_then(|(_, status)| *status);
    Wanted {
        credentials: Credentials::of(request, &params),
        task: params.get("task_id"),
        place: place(direction, &params),
        asked: asked.map_err(|(error, _)| error),
        format,
        status,
        condition,
        early: params.get("early").as_deref() == Some("true"),
        may_be_probe,
    }
}

/// What decides the host that does a transfer.
fn place(direction: Direction, params: &Params) -> Option<TransferPlace> {
    let vdi = || params.get("vdi").map(TransferPlace::Vdi);
    let sr = || params.get("sr_id").or_else(|| params.get("sr_uuid")).map(TransferPlace::Sr);
    let vm = || params.get("ref").or_else(|| params.get("uuid")).map(TransferPlace::Vm);
    match direction {
        Direction::Export => vdi(),
        Direction::Import => vdi().or_else(sr),
        Direction::ExportVm => vm(),
        Direction::ImportVm => sr(),
        // Records are the same everywhere, and a host that sends a guest has named the one that receives it.
        Direction::ExportMetadata | Direction::ImportMetadata | Direction::Memory => None,
        // All hosts have the same objects.
        Direction::ExportDatabase | Direction::ImportDatabase => None,
        // That which is asked.
        Direction::ExportHost | Direction::ImportHost => None,
    }
}

fn body_len<B>(request: &Request<B>) -> u64 {
    header(request, CONTENT_LENGTH).and_then(|len| len.parse().ok()).unwrap_or(0)
}

fn format_of(params: &Params) -> Result<ImageFormat, Refused> {
    match params.get("format").as_deref() {
        None | Some("raw") => Ok(ImageFormat::Raw),
        Some("vhd") => Ok(ImageFormat::Vhd),
        Some(other) => {
            let why = format!("the format '{other}' is not known: raw and vhd are");
            Err(wrong(StatusCode::NOT_FOUND, why))
        }
    }
}

fn missing() -> Refused {
    (ApiError::new("VDI_MISSING", ["", ""]), Some(StatusCode::BAD_REQUEST))
}

fn export(params: &Params, start: u64) -> Result<Asked, Refused> {
    let format = format_of(params)?;
    let vdi = params.get("vdi").ok_or_else(missing)?;
    let base = params.get("base");
    if base.is_some() && format != ImageFormat::Vhd {
        return Err(wrong(StatusCode::BAD_REQUEST, "a difference ('base') is exported as format=vhd"));
    }
    Ok(Asked::Export { vdi, base, format, start })
}

/// Whether a parameter is true: XenAPI takes no other word for that.
fn is_true(params: &Params, name: &str) -> bool {
    params.get(name).as_deref() == Some("true")
}

fn export_vm(params: &Params) -> Result<Asked, Refused> {
    let why = "name the VM: 'uuid' or 'ref'";
    let vm = params.get("ref").or_else(|| params.get("uuid"));
    let vm = vm.ok_or_else(|| wrong(StatusCode::BAD_REQUEST, why))?;
    let compression = match params.get("use_compression").as_deref() {
        Some("true" | "gzip") => ArchiveCompression::Gzip,
        Some("zstd") => ArchiveCompression::Zstd,
        _ => ArchiveCompression::None,
    };
    let preserve_power_state = is_true(params, "preserve_power_state");
    Ok(Asked::ExportVm { vm, compression, preserve_power_state })
}

fn export_metadata(params: &Params) -> Result<Asked, Refused> {
    let vm = params.get("ref").or_else(|| params.get("uuid"));
    if vm.is_none() && !is_true(params, "all") {
        return Err(wrong(StatusCode::BAD_REQUEST, "name the VM by 'uuid' or 'ref', or say 'all=true'"));
    }
    Ok(Asked::ExportMetadata { vm })
}

fn memory(params: &Params) -> Result<Asked, Refused> {
    let vm = params.get("vm").ok_or_else(|| wrong(StatusCode::BAD_REQUEST, "name the VM: 'vm'"))?;
    Ok(Asked::Memory { vm })
}

/// Disks that a client may name by hand.
const NAMED_DISKS_MAX: usize = 4096;

fn import_metadata<B>(request: &Request<B>, params: &Params) -> Result<Asked, Refused> {
    let asked = import_vm(request, params)?;
    let Asked::ImportVm { restore, force, .. } = asked else { return Ok(asked) };
    let vdis = params.beginning_with("vdi:");
    if vdis.len() > NAMED_DISKS_MAX {
        let why = format!("at most {NAMED_DISKS_MAX} disks are named by 'vdi:'");
        return Err(wrong(StatusCode::BAD_REQUEST, why));
    }
    Ok(Asked::ImportMetadata { restore, force, dry_run: is_true(params, "dry_run"), vdis })
}

fn import_vm<B>(request: &Request<B>, params: &Params) -> Result<Asked, Refused> {
    if header(request, TRANSFER_ENCODING).is_some() {
        return Err((ApiError::bare("IMPORT_ERROR_CANNOT_HANDLE_CHUNKED"), None));
    }
    let len = body_len(request);
    if len == 0 {
        let is_probe = params.get("task_id").is_none();
        let early = (ApiError::bare("IMPORT_ERROR_PREMATURE_EOF"), None);
        return if is_probe { Ok(Asked::Probe { vdi: None }) } else { Err(early) };
    }
    let sr = params.get("sr_id").or_else(|| params.get("sr_uuid"));
    Ok(Asked::ImportVm { sr, restore: is_true(params, "restore"), force: is_true(params, "force") })
}

/// The range of an export: from a byte to the end. Any other is left alone, as HTTP has it.
fn condition<B>(request: &Request<B>) -> Condition {
    let matches = header(request, IF_MATCH).map(str::to_owned);
    let range = header(request, RANGE).filter(|_| header(request, IF_RANGE).is_none());
    let start = range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.trim().parse().ok());
    Condition { start: start.unwrap_or(0), matches }
}

fn import<B>(request: &Request<B>, params: &Params) -> Result<Asked, Refused> {
    if header(request, TRANSFER_ENCODING).is_some() {
        return Err((ApiError::bare("IMPORT_ERROR_CANNOT_HANDLE_CHUNKED"), None));
    }
    let mut format = format_of(params)?;
    if params.has("chunked") {
        if format != ImageFormat::Raw {
            return Err(wrong(StatusCode::NOT_FOUND, "chunks have places on the disk: they are format=raw"));
        }
        format = ImageFormat::Chunked;
    }
    let (vdi, sr) = (params.get("vdi"), params.get("sr_id").or_else(|| params.get("sr_uuid")));
    if vdi.is_none() && sr.is_none() {
        return Err(missing());
    }
    if vdi.is_none() && format != ImageFormat::Raw {
        return Err(wrong(
            StatusCode::BAD_REQUEST,
            "a new VDI is made for a raw image: name the VDI ('vdi')",
        ));
    }
    let len = body_len(request);
    if len == 0 {
        // Clients look for a redirection with an empty body, and without their task, before they send a stream.
        let is_probe = params.get("task_id").is_none();
        let early = (ApiError::bare("IMPORT_ERROR_PREMATURE_EOF"), None);
        return if is_probe { Ok(Asked::Probe { vdi }) } else { Err(early) };
    }
    let len = (len < LEN_UNKNOWN).then_some(len);
    if vdi.is_none() && len.is_none() {
        return Err(wrong(
            StatusCode::BAD_REQUEST,
            "a new VDI needs the length of the image (Content-Length)",
        ));
    }
    let start = match header(request, CONTENT_RANGE) {
        None => 0,
        Some(text) => range_start(text, len).filter(|_| format == ImageFormat::Raw).ok_or_else(|| {
            let why = "Content-Range: a part of a raw image, as 'bytes FIRST-LAST/ALL', as long as the body";
            wrong(StatusCode::BAD_REQUEST, why)
        })?,
    };
    Ok(Asked::Import { vdi, sr, format, start, len })
}

/// The first byte of a part with as many bytes as the body has.
fn range_start(text: &str, len: Option<u64>) -> Option<u64> {
    let (part, _) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = part.split_once('-')?;
    let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    let whole = last.checked_sub(first)?.checked_add(1)?;
    len.is_none_or(|len| len == whole).then_some(first)
}
