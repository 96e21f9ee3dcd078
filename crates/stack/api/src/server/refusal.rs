//! What requests that are no calls are answered when they fail: a status, and XenAPI's error as text.

use hyper::StatusCode;
use hyper::header::{HeaderValue, WWW_AUTHENTICATE};
use tapio_model::ApiError;

use super::reply::{Reply, last_failure};

/// The answer to a request that failed.
pub(super) fn refusal(error: &ApiError, status: Option<StatusCode>) -> Reply {
    let mut reply = last_failure(status.unwrap_or_else(|| status_of(&error.code)), &error.to_string());
    if reply.status() == StatusCode::UNAUTHORIZED {
        let realm = HeaderValue::from_static("Basic realm=\"Tapio\"");
        reply.headers_mut().insert(WWW_AUTHENTICATE, realm);
    }
    reply
}

/// The status of an error.
pub(super) fn status_of(code: &str) -> StatusCode {
    match code {
        "SESSION_INVALID" | "SESSION_AUTHENTICATION_FAILED" => StatusCode::UNAUTHORIZED,
        "RBAC_PERMISSION_DENIED" | "SESSION_AUTHORIZATION_FAILED" | "IMPORT_ERROR_CANNOT_HANDLE_CHUNKED" => {
            StatusCode::FORBIDDEN
        }
        "HANDLE_INVALID"
        | "UUID_INVALID"
        | "VDI_MISSING"
        | "VDI_TOO_SMALL"
        | "VDI_TOO_LARGE"
        | "VDI_READONLY"
        | "VDI_IS_ENCRYPTED"
        | "DEFAULT_SR_NOT_FOUND"
        | "INVALID_VALUE"
        | "VALUE_NOT_SUPPORTED"
        | "IMPORT_ERROR"
        | "IMPORT_ERROR_PREMATURE_EOF"
        | "SR_OPERATION_NOT_SUPPORTED"
        | "SR_BACKEND_FAILURE_79" => StatusCode::BAD_REQUEST,
        "VDI_IN_USE"
        | "OTHER_OPERATION_IN_PROGRESS"
        | "OPERATION_NOT_ALLOWED"
        | "OPERATION_BLOCKED"
        | "VM_BAD_POWER_STATE" => StatusCode::CONFLICT,
        "TOO_MANY_PENDING_TASKS" => StatusCode::SERVICE_UNAVAILABLE,
        "SR_BACKEND_FAILURE_44" | "SR_FULL" => StatusCode::INSUFFICIENT_STORAGE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
