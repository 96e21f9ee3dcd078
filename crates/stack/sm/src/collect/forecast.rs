//! What a plan takes in all.

use super::{Job, Plan};

/// The space that a plan needs and gives back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forecast {
    /// Jobs that can be begun.
    pub jobs: usize,
    /// Bytes that must be free beside what is there, at most, at one time: each job takes what it needs before it gives
    /// anything back.
    pub needs: u64,
    /// Bytes that are free again in the end, beside those that were needed meanwhile.
    pub gives_back: u64,
}

impl Plan {
    /// What the jobs take one after the other, in their order. A job that a measured one makes possible is not known.
    pub fn forecast(&self) -> Forecast {
        let mut forecast = Forecast { jobs: self.jobs.len(), ..Forecast::default() };
        let (mut taken, mut given) = (0_u64, 0_u64);
        for Job { needs, gives_back, .. } in &self.jobs {
            taken = taken.saturating_add(*needs);
            forecast.needs = forecast.needs.max(taken.saturating_sub(given));
            given = given.saturating_add(*gives_back);
        }
        forecast.gives_back = given.saturating_sub(taken);
        forecast
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::collect::Work;

    #[test]
    fn what_a_job_gives_back_serves_the_next() {
        let job = |needs, gives_back| Job {
            work: Work::Leaf { image: Uuid::nil(), parent: Uuid::nil() },
            needs,
            is_measured: true,
            gives_back,
            disks: Vec::new(),
        };
        let of = |jobs: &[(u64, u64)]| {
            let jobs = jobs.iter().map(|(needs, gives)| job(*needs, *gives)).collect();
            let forecast = Plan { jobs, skipped: Vec::new() }.forecast();
            (forecast.jobs, forecast.needs, forecast.gives_back)
        };
        assert_eq!(of(&[]), (0, 0, 0));
        assert_eq!(of(&[(30, 40)]), (1, 30, 10));
        assert_eq!(of(&[(30, 40), (35, 40), (5, 5)]), (3, 30, 15));
        assert_eq!(of(&[(0, 40), (30, 30)]), (2, 0, 40));
    }
}
