//! What a listener wants to hear of, and where it stands.

use std::collections::BTreeSet;

use tapio_model::{ApiError, Class, Role, Value};

use crate::db::{Generation, History};

/// Entries of a list of classes.
const SUBSCRIPTIONS_MAX: usize = 10_000;

/// What a listener wants to hear of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Everything.
    all: bool,
    classes: BTreeSet<&'static str>,
    /// Class, and reference in lower case.
    objects: BTreeSet<(&'static str, String)>,
}

/// Whether a class has events: sessions are secrets.
pub(crate) fn has_events(class: &Class) -> bool {
    class.kind == tapio_model::ClassKind::Objects
}

impl Filter {
    /// Reads `*`, `vm`, `VDI`, `vbd/OpaqueRef:..`. A class that there is not has no events.
    ///
    /// # Errors
    /// `EVENT_SUBSCRIPTION_PARSE_FAILURE`.
    pub fn parse(subscriptions: &Value) -> Result<Self, ApiError> {
        let mut filter = Self::default();
        let subscriptions = subscriptions.as_set().unwrap_or_default();
        let refused = |what: &str| {
            ApiError::new("EVENT_SUBSCRIPTION_PARSE_FAILURE", [what.chars().take(200).collect::<String>()])
        };
        if subscriptions.len() > SUBSCRIPTIONS_MAX {
            return Err(refused(&format!("more than {SUBSCRIPTIONS_MAX} entries")));
        }
        for subscription in subscriptions {
            let text = subscription.as_str().unwrap_or_default();
            if text == "*" {
                filter.all = true;
                continue;
            }
            let (class, reference) = text.split_once('/').map_or((text, None), |(c, r)| (c, Some(r)));
            if class.is_empty() || reference.is_some_and(str::is_empty) {
                return Err(refused(text));
            }
            let Some(class) = tapio_model::class(class) else { continue };
            match reference {
                None => {
                    filter.classes.insert(class.name);
                }
                Some(reference) => {
                    filter.objects.insert((class.name, reference.to_ascii_lowercase()));
                }
            }
        }
        Ok(filter)
    }

    fn wants_class(&self, class: &Class) -> bool {
        self.all || self.classes.contains(class.name) || self.objects.iter().any(|(of, _)| *of == class.name)
    }

    pub(crate) fn wants(&self, class: &Class, reference: &str) -> bool {
        if self.all || self.classes.contains(class.name) {
            return true;
        }
        !self.objects.is_empty() && self.objects.contains(&(class.name, reference.to_ascii_lowercase()))
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.all && self.classes.is_empty() && self.objects.is_empty()
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.all |= other.all;
        self.classes.extend(other.classes);
        self.objects.extend(other.objects);
    }

    pub(crate) fn remove(&mut self, other: &Self) {
        if other.all {
            *self = Self::default();
        }
        self.classes.retain(|class| !other.classes.contains(class));
        self.objects.retain(|object| !other.objects.contains(object));
    }

    /// The classes of it that `role` may see.
    pub(crate) fn classes(&self, role: Role) -> Vec<&'static Class> {
        let all = tapio_model::CLASSES.iter().copied();
        all.filter(|class| has_events(class) && self.wants_class(class) && role >= class.reader_role)
            .collect()
    }
}

/// Where a listener stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Token {
    pub(crate) generation: Generation,
    pub(crate) volatile: usize,
}

impl Token {
    /// Reads one; the empty text is the beginning of all time.
    ///
    /// # Errors
    /// `EVENT_FROM_TOKEN_PARSE_FAILURE`.
    pub fn parse(text: &str) -> Result<Self, ApiError> {
        if text.is_empty() {
            return Ok(Self::default());
        }
        let parts = text.split_once(',');
        let read = parts.and_then(|(generation, volatile)| {
            Some(Self { generation: generation.parse().ok()?, volatile: volatile.parse().ok()? })
        });
        let shown = || text.chars().take(100).collect::<String>();
        read.ok_or_else(|| ApiError::new("EVENT_FROM_TOKEN_PARSE_FAILURE", [shown()]))
    }

    pub(crate) fn of(history: &History) -> Self {
        Self { generation: history.generation, volatile: history.volatile }
    }

    pub(crate) fn text(self) -> String {
        format!("{},{}", self.generation, self.volatile)
    }
}

/// What a session registered for with `event.register`.
#[derive(Debug)]
pub struct Registration {
    pub(crate) filter: Filter,
    pub(crate) token: Token,
}
