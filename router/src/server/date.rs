//! The value of the header field `Date`.

use std::{
    cell::Cell,
    fmt::Write,
    time::{Duration, SystemTime},
};

use httpdate::HttpDate;

/// Length of a date, such as `Sun, 06 Nov 1994 08:49:37 GMT`.
const LENGTH: usize = 29;

thread_local! {
    /// The last date of this thread, and its second since 1970.
    static LAST: Cell<(u64, [u8; LENGTH])> = const { Cell::new((u64::MAX, [0; LENGTH])) };
}

/// The present time. Formatted once a second.
pub(super) fn now() -> [u8; LENGTH] {
    of(SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()))
}

fn of(second: u64) -> [u8; LENGTH] {
    let (last, text) = LAST.get();
    if last == second {
        return text;
    }
    let mut text = String::with_capacity(LENGTH);
    let date = HttpDate::from(SystemTime::UNIX_EPOCH + Duration::from_secs(second));
    write!(text, "{date}").expect("contract: a string takes any text");
    let text = text.as_bytes().try_into().expect("contract: a date has this length until 9999");
    LAST.set((second, text));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_second_has_its_date() {
        for (second, date) in [
            (0, "Thu, 01 Jan 1970 00:00:00 GMT"), // also of a clock that is set to an earlier time
            (784_111_777, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (784_111_777, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (784_111_778, "Sun, 06 Nov 1994 08:49:38 GMT"),
            (1, "Thu, 01 Jan 1970 00:00:01 GMT"),
        ] {
            assert_eq!(of(second), date.as_bytes());
        }
    }
}
