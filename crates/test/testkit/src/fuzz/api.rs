//! What clients of the toolstack send, and what its own clients are answered.

use tapio_api::limits::MessageLimits;
use tapio_api::{jsonrpc, xmlrpc};

/// What we write is read again within somewhat wider bounds: an envelope is around it.
fn wider() -> MessageLimits {
    let MessageLimits { depth_max, values_max } = MessageLimits::default();
    MessageLimits { depth_max: depth_max + 4, values_max: 2 * values_max }
}

/// Calls and answers: read or refused; what is read can be written, and reads the same ever after.
pub(super) fn xmlrpc(bytes: &[u8]) {
    if let Ok(call) = xmlrpc::decode_call(bytes, MessageLimits::default()) {
        // The first trip makes numbers texts; from then on nothing changes.
        let first = xmlrpc::encode_call(&call.method, &call.params);
        let second = xmlrpc::decode_call(first.as_bytes(), wider()).expect("our own call");
        let text = xmlrpc::encode_call(&second.method, &second.params);
        let third = xmlrpc::decode_call(text.as_bytes(), wider()).expect("our own call");
        assert_eq!(xmlrpc::encode_call(&third.method, &third.params), text);
        assert_eq!((second.method, second.params.len()), (third.method, call.params.len()));
    }
    match xmlrpc::decode_response(bytes, MessageLimits::default()) {
        Ok(Ok(value)) => {
            let text = xmlrpc::encode_success(&value);
            let again = xmlrpc::decode_response(text.as_bytes(), wider()).expect("our own answer");
            assert!(again.is_ok(), "success became {again:?}");
        }
        Ok(Err(error)) => {
            let text = xmlrpc::encode_failure(&error);
            let again = xmlrpc::decode_response(text.as_bytes(), wider()).expect("our own answer");
            assert_eq!(again.expect_err("a failure").params.len(), error.params.len());
        }
        Err(_) => {}
    }
}

/// Requests and batches: read or refused; every answer is JSON.
pub(super) fn jsonrpc(bytes: &[u8]) {
    let calls = match jsonrpc::decode(bytes, MessageLimits::default()) {
        Err(malformed) => {
            let text = jsonrpc::encode_malformed(&malformed);
            jsonrpc::decode_value(text.as_bytes(), wider()).expect("our own answer");
            return;
        }
        Ok(jsonrpc::Body::One(call)) => vec![call],
        Ok(jsonrpc::Body::Batch(calls)) => calls,
    };
    assert!(calls.len() <= jsonrpc::BATCH_LEN_MAX);
    let mut answers = Vec::new();
    for call in calls {
        match call {
            Err(invalid) => answers.push(jsonrpc::encode_invalid(&invalid)),
            Ok(call) => {
                let echo = Ok(tapio_model::Value::Set(call.params));
                answers.push(jsonrpc::encode_answer(call.version, &call.id, &echo));
                let error = Err(tapio_model::ApiError::new("ANY", [call.method]));
                answers.push(jsonrpc::encode_answer(call.version, &call.id, &error));
            }
        }
    }
    let text = jsonrpc::encode_batch(&answers);
    let read = jsonrpc::decode_value(text.as_bytes(), wider()).expect("our own answers");
    assert_eq!(read.as_set().map(<[_]>::len), Some(answers.len()));
}

/// What a viewer of a console sends. However its bytes are cut, the same frames come out, and none is longer than they.
pub fn websocket(bytes: &[u8]) {
    use tapio_api::server::websocket::Frames;
    let frames_of = |piece: usize| {
        let (mut frames, mut found) = (Frames::default(), Vec::new());
        for bytes in bytes.chunks(piece) {
            frames.push(bytes);
            loop {
                match frames.take() {
                    Ok(Some(frame)) => found.push(frame),
                    Ok(None) => break,
                    Err(why) => return (found, Some(why)),
                }
            }
        }
        (found, None)
    };
    let whole = frames_of(bytes.len().max(1));
    assert!(whole.0.len() <= bytes.len() / 6, "a frame has six bytes at least");
    assert_eq!(frames_of(3), whole);
}
