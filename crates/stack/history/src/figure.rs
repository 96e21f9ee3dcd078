//! Figures and texts as the documents have them.

use serde_json::Value;

/// A text in quotes.
pub(crate) fn text(text: &str) -> String {
    Value::from(text).to_string()
}

/// A number; JSON has none for what is unknown or unlimited, so these are texts.
pub(crate) fn number(value: f64) -> String {
    let short = Short(value).to_string();
    if value.is_finite() { short } else { text(&short) }
}

/// What separates an element from the one before it.
pub(crate) const fn comma(at: usize) -> &'static str {
    if at == 0 { "" } else { "," }
}

/// A figure of 4 bytes, in as few characters as it needs.
pub(crate) struct Short(pub(crate) f64);

impl std::fmt::Display for Short {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let short = self.0 as f32;
        match self.0 {
            value if value.is_nan() => f.write_str("NaN"),
            value if value == f64::INFINITY => f.write_str("Infinity"),
            value if value == f64::NEG_INFINITY => f.write_str("-Infinity"),
            _ if short != 0.0 && !(1e-4..1e15).contains(&short.abs()) => write!(f, "{short:e}"),
            _ => write!(f, "{short}"),
        }
    }
}
