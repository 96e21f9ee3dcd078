//! The dashboard's files over HTTP. They hold nothing of this host, so no account is asked for; data comes by calls.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{HeaderName, HeaderValue, LOCATION};
use hyper::{Method, Request, StatusCode};
use tapio_api::backend::{BoxFuture, Peer};
use tapio_api::server::{Reply, Route, RouteHandler, failure, reply};

/// What paths of the dashboard begin with.
const PREFIX: &str = "/dashboard";

struct Files;

impl RouteHandler for Files {
    fn handle(&self, _: Peer, request: Request<Incoming>) -> BoxFuture<Reply> {
        let reply = answer(request.uri().path());
        Box::pin(std::future::ready(reply))
    }
}

fn answer(path: &str) -> Reply {
    if path == PREFIX {
        let mut moved = failure(StatusCode::PERMANENT_REDIRECT, "the dashboard is at /dashboard/");
        moved.headers_mut().insert(LOCATION, HeaderValue::from_static("/dashboard/"));
        return moved;
    }
    let mut answer = match tapio_dashboard::asset(path) {
        Some(asset) => reply(StatusCode::OK, asset.kind, asset.text),
        None => failure(StatusCode::NOT_FOUND, &format!("{path}: the dashboard has no such file")),
    };
    for (name, value) in tapio_dashboard::HEADERS {
        answer.headers_mut().insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    answer
}

/// The route to the dashboard.
pub fn route() -> Route {
    Route { method: Method::GET, prefix: PREFIX.to_owned(), handler: Arc::new(Files) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_come_with_the_policy_and_nothing_else_comes() {
        let page = answer("/dashboard/");
        assert_eq!(page.status(), StatusCode::OK);
        for path in ["/dashboard/", "/dashboard/app.js", "/dashboard/nothing"] {
            let answer = answer(path);
            let policy = answer.headers().get("content-security-policy").expect("a policy");
            assert!(policy.to_str().is_ok_and(|policy| policy.starts_with("default-src 'none'")), "{path}");
            assert_eq!(answer.headers().get("x-content-type-options").expect("set"), "nosniff");
        }
        assert_eq!(answer("/dashboard/nothing").status(), StatusCode::NOT_FOUND);
        assert_eq!(answer("/dashboardish").status(), StatusCode::NOT_FOUND);
        assert_eq!(answer("/dashboard").headers().get(LOCATION).expect("a place"), "/dashboard/");
    }
}
