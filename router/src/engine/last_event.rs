//! The last event of a stream: `[DONE]`, a last event of the Responses or Messages API, or an error.

use memchr::memmem;

/// Names of the last events of the Responses and Messages API. Their streams have no `[DONE]`.
const LAST_NAMES: [&[u8]; 5] =
    [b"response.completed", b"response.incomplete", b"response.failed", b"message_stop", b"error"];

/// The names among [`LAST_NAMES`] that report an error.
const ERROR_NAMES: [&[u8]; 2] = [b"response.failed", b"error"];

/// Codes of error events by which a worker of this project says that it is stopping: another worker can continue.
const STOPPING_CODES: [&[u8]; 3] =
    [b"\"code\":\"scheduler_ended\"", b"\"code\":\"draining\"", b"\"code\":\"engine_died\""];

/// Whether the event with this data reports an error in OpenAI's shape. Such an event ends a stream.
pub(crate) fn is_error(data: &[u8]) -> bool {
    data.starts_with(b"{\"error\"")
}

/// Whether the worker that sent this error event is stopping.
pub(crate) fn is_going_away(data: &[u8]) -> bool {
    STOPPING_CODES.iter().any(|code| memmem::find(data, code).is_some())
}

/// Whether an event that is not an error is the last of its stream.
pub(crate) fn is_last(name: &[u8], data: &[u8]) -> bool {
    data.starts_with(b"[DONE]") || LAST_NAMES.contains(&name)
}

/// Whether a last event of this name completes an answer.
pub(crate) fn completes_answer(name: &[u8]) -> bool {
    !ERROR_NAMES.contains(&name)
}
