//! The tapdisk control protocol and our own: messages, client, finding and starting disk processes.
