//! What can be wrong with a certificate that is to be shown.

use std::fmt;

use tapio_model::{ApiError, datetime};

/// Why a certificate and a key are not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// There is no certificate, or none that can be read.
    Certificate(String),
    /// There is no authority's certificate in what was given as the chain.
    Chain(String),
    /// There is no key, or none that can be used.
    Key(String),
    /// The key is another certificate's.
    Mismatch,
    /// It ended at this time: seconds since 1970.
    Ended(i64),
    /// It begins at this time: seconds since 1970.
    Early(i64),
    /// It cannot be kept.
    File(String),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Certificate(why) | Self::Chain(why) | Self::Key(why) | Self::File(why) => f.write_str(why),
            Self::Mismatch => f.write_str("the key is not the certificate's"),
            Self::Ended(at) => write!(f, "the certificate ended on {}", datetime::format(*at)),
            Self::Early(at) => write!(f, "the certificate begins on {}", datetime::format(*at)),
        }
    }
}

impl From<Wrong> for String {
    fn from(wrong: Wrong) -> Self {
        wrong.to_string()
    }
}

impl From<Wrong> for ApiError {
    /// XenAPI's code for it.
    fn from(wrong: Wrong) -> Self {
        let now = || datetime::format(super::now());
        match wrong {
            Wrong::Certificate(why) => Self::new("SERVER_CERTIFICATE_INVALID", [why]),
            Wrong::Chain(why) => Self::new("SERVER_CERTIFICATE_CHAIN_INVALID", [why]),
            Wrong::Key(why) => Self::new("SERVER_CERTIFICATE_KEY_INVALID", [why]),
            Wrong::Mismatch => Self::bare("SERVER_CERTIFICATE_KEY_MISMATCH"),
            Wrong::Ended(at) => Self::new("SERVER_CERTIFICATE_EXPIRED", [now(), datetime::format(at)]),
            Wrong::Early(at) => Self::new("SERVER_CERTIFICATE_NOT_VALID_YET", [now(), datetime::format(at)]),
            Wrong::File(why) => Self::internal(why),
        }
    }
}
