//! What one domain may use. The control domain and sockets may use what they like.

/// What is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Quota {
    /// Nodes that the domain owns.
    Nodes,
    /// Watches.
    Watches,
    /// Open transactions.
    Transactions,
    /// Replies and events that the domain has not taken; more requests are not read until it does.
    Outstanding,
    /// Nodes that one transaction looks at.
    TransactionNodes,
    /// Bytes of everything that is kept for the domain.
    Memory,
    /// Bytes of one node: its value, its permissions and the names of its children.
    NodeSize,
    /// Bytes of a path, not counting `/local/domain/N/`.
    PathMax,
    /// Permissions of one node.
    Permissions,
}

/// Name on the wire, first value and description of each, in the order of [`Quota`].
pub const QUOTAS: [(&str, u64, &str); 9] = [
    ("nodes", 1000, "Nodes per domain"),
    ("watches", 128, "Watches per domain"),
    ("transactions", 10, "Open transactions per domain"),
    ("outstanding", 20, "Replies and events that a domain has not taken"),
    ("transaction-nodes", 1024, "Nodes that one transaction looks at"),
    ("memory", 2 * 1024 * 1024 + 512 * 1024, "Bytes kept for a domain"),
    ("node-size", 2048, "Bytes of a node"),
    ("path-max", 2048, "Bytes of a path below /local/domain/N/"),
    ("permissions", 5, "Permissions of a node"),
];

/// A value for each quota; 0 is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits([u64; QUOTAS.len()]);

impl Default for Limits {
    fn default() -> Self {
        Self(QUOTAS.map(|(_, value, _)| value))
    }
}

impl Limits {
    /// No limits at all.
    pub const NONE: Self = Self([0; QUOTAS.len()]);

    /// The value of one; 0 is no limit.
    pub fn get(&self, quota: Quota) -> u64 {
        self.0[quota as usize]
    }

    /// Whether `used` is more than allowed.
    pub fn exceeded(&self, quota: Quota, used: u64) -> bool {
        let limit = self.get(quota);
        limit != 0 && used > limit
    }

    /// The value of the one of this name.
    pub fn by_name(&self, name: &str) -> Option<u64> {
        QUOTAS.iter().position(|quota| quota.0 == name).map(|index| self.0[index])
    }

    /// Sets the one of this name. False when there is none.
    pub fn set(&mut self, name: &str, value: u64) -> bool {
        let Some(index) = QUOTAS.iter().position(|quota| quota.0 == name) else { return false };
        self.0[index] = value;
        true
    }

    /// All values, in the order of [`QUOTAS`].
    pub fn values(&self) -> &[u64] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_order_belong_together() {
        let mut limits = Limits::default();
        assert_eq!(limits.get(Quota::Watches), 128);
        assert_eq!(limits.by_name("permissions"), Some(limits.get(Quota::Permissions)));
        assert!(limits.set("nodes", 2) && !limits.set("noodles", 2));
        assert!(limits.exceeded(Quota::Nodes, 3) && !limits.exceeded(Quota::Nodes, 2));
        assert!(!Limits::NONE.exceeded(Quota::Nodes, u64::MAX));
    }
}
