//! What clients of XenServer's own `xe` send.

use tapio_model::thin::{self, Reply, WORDS_LEN_MAX, WORDS_MAX};

/// The head of a request, its words, a greeting, a reply: read or refused with a sentence. What was read is bounded,
/// and a reply is the only one of its bytes.
pub(super) fn thin_cli(bytes: &[u8]) {
    let said = |why: &str| assert!(!why.is_empty() && why.len() < 200, "{why}");
    match thin::body_len(bytes) {
        Ok(len) => assert!(len <= WORDS_LEN_MAX),
        Err(why) => said(&why),
    }
    match thin::words(bytes) {
        Ok(words) => {
            assert!(words.words.len() <= WORDS_MAX);
            let len: usize = words.words.iter().map(String::len).sum();
            assert!(len <= bytes.len(), "words are parts of what was sent");
            let secret = |word: &String| word.starts_with("password=") || word.starts_with("username=");
            assert!(!words.words.iter().any(secret), "an account is no word");
        }
        Err(why) => said(&why),
    }
    match thin::check_hello(bytes) {
        Ok(()) => assert!(bytes.starts_with(thin::PREFIX)),
        Err(why) => said(&why),
    }
    match thin::reply(bytes) {
        Ok(Reply::Chunk(len)) => assert_eq!(bytes[8..], len.to_le_bytes()),
        Ok(_) => assert_eq!(bytes.len(), 8),
        Err(why) => said(&why),
    }
}
