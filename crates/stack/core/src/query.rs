//! The expressions of `get_all_records_where`: `field "SR" = "OpaqueRef:.." and not (field "managed" = "false")`.
//!
//! `true`, `false`, `A = B` of fields and texts, `not`, `and`, `or` and parentheses; `and` binds closer than `or`.

use tapio_model::{ApiError, Class, Value};

use crate::dates;

/// Longest expression, in bytes.
const LEN_MAX: usize = 64 << 10;

/// Levels of parentheses and `not`.
const DEPTH_MAX: usize = 64;

/// One side of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Side {
    /// A field of the object, by its name in records.
    Field(String),
    /// A text.
    Text(String),
}

/// What must hold for an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// Always, or never.
    Is(bool),
    /// Both sides are the same text.
    Eq(Side, Side),
    /// It does not hold.
    Not(Box<Expr>),
    /// All hold.
    And(Vec<Expr>),
    /// One holds.
    Or(Vec<Expr>),
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Text(String),
    Open,
    Close,
    Equals,
}

struct Parser {
    tokens: Vec<Token>,
    at: usize,
}

/// Reads an expression about objects of a class.
///
/// # Errors
/// `VALUE_NOT_SUPPORTED` for `expr`, with where and why.
pub fn parse(class: &Class, text: &str) -> Result<Expr, ApiError> {
    let refused = |why: String| {
        let shown: String = text.chars().take(200).collect();
        ApiError::new("VALUE_NOT_SUPPORTED", ["expr".to_owned(), shown, why])
    };
    if text.len() > LEN_MAX {
        return Err(refused(format!("it is longer than {LEN_MAX} bytes")));
    }
    let mut parser = Parser { tokens: tokens(text).map_err(refused)?, at: 0 };
    let parsed = parser.any_of(0).and_then(|parsed| match parser.peek() {
        None => Ok(parsed),
        Some(token) => Err(format!("{token:?} stands behind its end")),
    });
    let parsed = parsed.map_err(refused)?;
    match unknown_field(class, &parsed) {
        Some(field) => Err(refused(format!("{} has no field {field}", class.name))),
        None => Ok(parsed),
    }
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        tokens.push(match c {
            c if c.is_whitespace() => continue,
            '(' => Token::Open,
            ')' => Token::Close,
            '=' => Token::Equals,
            '"' | '\'' => {
                let mut inside = String::new();
                loop {
                    match chars.next() {
                        None => return Err(format!("a text has no end: {c}{inside}")),
                        Some(end) if end == c => break,
                        Some('\\') => inside.extend(chars.next()),
                        Some(other) => inside.push(other),
                    }
                }
                Token::Text(inside)
            }
            c if c.is_alphanumeric() || c == '_' => {
                let mut word = String::from(c);
                while let Some(next) = chars.next_if(|c| c.is_alphanumeric() || *c == '_') {
                    word.push(next);
                }
                Token::Word(word)
            }
            other => return Err(format!("'{other}' means nothing here")),
        });
    }
    Ok(tokens)
}

impl Parser {
    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at)
    }

    fn next(&mut self) -> Option<Token> {
        let token = self.tokens.get(self.at).cloned();
        self.at += 1;
        token
    }

    fn takes(&mut self, word: &str) -> bool {
        let is_next = matches!(self.peek(), Some(Token::Word(next)) if next.eq_ignore_ascii_case(word));
        self.at += usize::from(is_next);
        is_next
    }

    fn any_of(&mut self, depth: usize) -> Result<Expr, String> {
        let mut parts = vec![self.all_of(depth)?];
        while self.takes("or") {
            parts.push(self.all_of(depth)?);
        }
        Ok(if parts.len() == 1 { parts.swap_remove(0) } else { Expr::Or(parts) })
    }

    fn all_of(&mut self, depth: usize) -> Result<Expr, String> {
        let mut parts = vec![self.one(depth)?];
        while self.takes("and") {
            parts.push(self.one(depth)?);
        }
        Ok(if parts.len() == 1 { parts.swap_remove(0) } else { Expr::And(parts) })
    }

    fn one(&mut self, depth: usize) -> Result<Expr, String> {
        if depth > DEPTH_MAX {
            return Err(format!("it has more than {DEPTH_MAX} levels"));
        }
        if self.takes("not") {
            return Ok(Expr::Not(Box::new(self.one(depth + 1)?)));
        }
        if self.takes("true") {
            return Ok(Expr::Is(true));
        }
        if self.takes("false") {
            return Ok(Expr::Is(false));
        }
        if self.peek() == Some(&Token::Open) {
            self.at += 1;
            let inside = self.any_of(depth + 1)?;
            return match self.next() {
                Some(Token::Close) => Ok(inside),
                Some(other) => Err(format!("{other:?} stands where ')' should")),
                None => Err("a ')' is missing at the end".to_owned()),
            };
        }
        let left = self.side()?;
        match self.next() {
            Some(Token::Equals) => Ok(Expr::Eq(left, self.side()?)),
            Some(other) => Err(format!("{other:?} stands where '=' should")),
            None => Err("'=' is missing at the end".to_owned()),
        }
    }

    fn side(&mut self) -> Result<Side, String> {
        match self.next() {
            Some(Token::Text(text)) => Ok(Side::Text(text)),
            Some(Token::Word(word)) if word.eq_ignore_ascii_case("field") => match self.next() {
                // Databases of XenServer join nested names by two of them.
                Some(Token::Text(name)) => Ok(Side::Field(name.replace("__", "_"))),
                _ => Err("the word field needs a name in quotes".to_owned()),
            },
            Some(other) => Err(format!("{other:?} stands where a field or a text should")),
            None => Err("a field or a text is missing at the end".to_owned()),
        }
    }
}

fn unknown_field<'a>(class: &Class, expr: &'a Expr) -> Option<&'a str> {
    let is_unknown = |side: &'a Side| match side {
        Side::Field(name) if name != "_ref" && class.field(name).is_none() => Some(name.as_str()),
        _ => None,
    };
    match expr {
        Expr::Is(_) => None,
        Expr::Eq(left, right) => is_unknown(left).or_else(|| is_unknown(right)),
        Expr::Not(inner) => unknown_field(class, inner),
        Expr::And(parts) | Expr::Or(parts) => parts.iter().find_map(|part| unknown_field(class, part)),
    }
}

impl Expr {
    /// Whether it holds; `text_of` gives the text of a field.
    pub fn holds(&self, text_of: &dyn Fn(&str) -> String) -> bool {
        let text = |side: &Side| match side {
            Side::Field(name) => text_of(name),
            Side::Text(text) => text.clone(),
        };
        match self {
            Self::Is(truth) => *truth,
            Self::Eq(left, right) => text(left) == text(right),
            Self::Not(inner) => !inner.holds(text_of),
            Self::And(parts) => parts.iter().all(|part| part.holds(text_of)),
            Self::Or(parts) => parts.iter().any(|part| part.holds(text_of)),
        }
    }

    /// A field and its text without which it cannot hold, for a look into an index.
    pub fn needs(&self) -> Option<(&str, &str)> {
        match self {
            Self::Eq(Side::Field(field), Side::Text(text))
            | Self::Eq(Side::Text(text), Side::Field(field)) => Some((field, text)),
            Self::And(parts) => parts.iter().find_map(Self::needs),
            _ => None,
        }
    }
}

/// A value as these expressions compare it: sets and maps in the brackets of XenServer's database.
pub fn text_of(value: &Value) -> String {
    let quoted = |text: &str| format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"));
    match value {
        Value::Void => String::new(),
        Value::Bool(truth) => truth.to_string(),
        Value::Int(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::String(text) => text.clone(),
        Value::DateTime(seconds) => dates::format(*seconds),
        Value::Set(members) => {
            let members: Vec<String> = members.iter().map(|member| quoted(&text_of(member))).collect();
            format!("({})", members.join(" "))
        }
        Value::Map(pairs) => {
            let pairs =
                pairs.iter().map(|(key, value)| format!("({} {})", quoted(key), quoted(&text_of(value))));
            format!("({})", pairs.collect::<Vec<_>>().join(" "))
        }
    }
}
