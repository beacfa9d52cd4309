-- The audit as SQL over an export, by the rules of docs/audit.md and without a line of delayd's code:
--
--     delayd export --data /var/lib/delayd --out books
--     cd books && (cat PATH/examples/audit.sql; echo "from totals; from findings order by all limit 100;") | duckdb
--
-- `totals`, `hours` (figures by delay server and hour), `subjects` (by subject, too), `findings` (a row for each thing
-- that is wrong) and `consumption` (by group).

create view accepted as from 'accepted/*.parquet';
create view decision as from 'decision/*.parquet';
create view schedule as from read_parquet('schedule/*.parquet', file_row_number = true);
create view dispatch as from 'dispatch/*.parquet';
create view message as from 'message/*.parquet';
create view span as from 'span.parquet';
create view target as from 'target.parquet';
create view terms as from 'terms.parquet';
create view server as from 'server.parquet';
create view skipped as from 'skipped.parquet';
create view hour as from 'hour/*.parquet';
create view fault as from 'fault.parquet';

-- Up to when what fell due was settled, for the subject or for all others. A row that stands twice is compared with the
-- other logs once, as its first copy has it.
create view scheduled as
select
    s.*,
    greatest(s.deliver_at_ms, coalesce(s.appended_at_ms, 0)) as due_from_ms,
    coalesce(own.since_ms, common.since_ms) as since_ms,
    coalesce(own.until_ms, common.until_ms) as until_ms,
    row_number() over (partition by s.log_id, s.hour, s.sequence order by s.file_row_number) as copy,
    count(*) over (partition by s.log_id, s.hour, s.sequence) as copies
from schedule s
join span common on common.log_id = s.log_id and common.subject is null
left join span own on own.log_id = s.log_id and own.subject = s.subject;

-- By message: how often it has an outcome, the first one, and the earliest claim that one names.
create view told as
select
    log_id, hour, sequence,
    count(*) as times,
    arg_min(outcome, place) as outcome,
    arg_min(coalesce(reason, ''), place) as reason,
    arg_min(coalesce(other_sequence, 0), place) as other_sequence,
    arg_min(coalesce(other_deliver_at_ms, 0), place) as other_due_ms,
    arg_min(coalesce(target, ''), place) as target,
    arg_min(coalesce(target_offset, 0), place) as target_offset,
    arg_min(coalesce(claimed_at_ms, 0), place) as claimed_at_ms,
    arg_min(coalesce(target_appended_at_ms, 0), place) as appended_at_ms,
    arg_min(deliver_at_ms, place) as deliver_at_ms,
    arg_min(coalesce(epoch, 0), place) as epoch,
    arg_min(coalesce(batch_id, 0), place) as batch_id,
    arg_min(attempt, place) as attempt,
    arg_min(coalesce(content_hash, 0), place) as content_hash,
    min(claimed_at_ms) filter (where outcome = 'DISPATCHED') as first_claim_ms
from dispatch
group by all;

-- By message: how often targets hold it, and the first such row.
create view stored as
select
    origin as log_id, hour, sequence,
    count(*) as times,
    arg_min(log_id, place) as target,
    arg_min("offset", place) as target_offset,
    arg_min(claimed_at_ms, place) as claimed_at_ms,
    arg_min(appended_at_ms, place) as appended_at_ms,
    arg_min(deliver_at_ms, place) as deliver_at_ms,
    arg_min(decided, place) as decided,
    arg_min(subject, place) as subject,
    arg_min(epoch, place) as epoch,
    arg_min(batch_id, place) as batch_id,
    arg_min(coalesce(content_hash, 0), place) as content_hash,
    min(claimed_at_ms) as first_claim_ms
from message
group by all;

-- A table, for nearly everything below asks for it.
create temp table judged as
with joined as (
    select
        s.*,
        coalesce(t.times, 0) as outcomes,
        coalesce(m.times, 0) as places,
        t.outcome, t.reason, t.other_sequence, t.other_due_ms,
        coalesce(t.outcome = 'DISPATCHED', false) as said_dispatched,
        t.target as said_target, t.target_offset as said_offset, t.claimed_at_ms as said_claim_ms,
        t.appended_at_ms as said_append_ms, t.deliver_at_ms as said_due_ms,
        m.target, m.target_offset, m.claimed_at_ms, m.appended_at_ms as stored_ms, m.deliver_at_ms as stored_due_ms,
        m.decided, m.subject as stored_subject, m.epoch as stored_epoch, m.batch_id as stored_batch,
        t.epoch as said_epoch, t.batch_id as said_batch, t.attempt as said_attempt,
        t.content_hash as said_content, m.content_hash as stored_content,
        least(t.first_claim_ms, m.first_claim_ms) as first_claim_ms,
        -- A target whose log is not here proves nothing, nor does one whose retention has removed the place.
        place.log_id is null or t.target_offset < place.start_offset as unprovable
    from scheduled s
    left join told t on s.copy = 1 and (t.log_id, t.hour, t.sequence) = (s.log_id, s.hour, s.sequence)
    left join stored m on s.copy = 1 and (m.log_id, m.hour, m.sequence) = (s.log_id, s.hour, s.sequence)
    left join target place on place.log_id = t.target
    cross join terms
),
known as (
    select
        *,
        said_dispatched and places = 0 and unprovable as unproven,
        said_dispatched and places = 0 and not unprovable as not_there,
        outcomes = 0 and places = 0 as without_word
    from joined
)
select
    known.*,
    said_dispatched and not not_there as proved,
    without_word and greatest(due_from_ms, since_ms) + grace_ms < until_ms as overdue,
    without_word and due_from_ms > now_ms as pending,
    without_word and due_from_ms + grace_ms < now_ms and not overdue as waiting,
    if(places > 0, stored_ms, said_append_ms) as came_ms,
    proved and coalesce(appended_at_ms, 0) > deliver_at_ms as past_due,
    coalesce(outcome = 'CANCELLED' and reason in ('MOVED', 'DRAINED'), false) as moved,
    -- Dead letters are kept for 725 days, and are sent again by moving them to the instant at which they died.
    moved and reason = 'MOVED' and starts_with(subject, '%retry/')
        and deliver_at_ms - other_due_ms = 725::bigint * 86_400_000 as redriven,
    if(proved, came_ms - due_from_ms, null) as lateness_ms,
    if(proved, greatest(came_ms, said_claim_ms) - due_from_ms, 0) as late_ms
from known, terms;

-- Rows of the message log that their hour's schedule log does not hold; an operator may have given up as many.
create view unfiled as
select *, count(*) over (partition by log_id, hour) as missing from accepted a
where not exists (from schedule s where (s.log_id, s.hour, s.sequence) = (a.log_id, a.hour, a.sequence));

-- Rows of schedule logs: whether their sequence was ever given, and whether the message log has them elsewhere.
create view ungiven as
with judged_rows as (
    select
        s.*, v.first_sequence,
        s.sequence >= v.next_sequence or exists (
            from skipped k
            where k.log_id = s.log_id and s.sequence >= k.first_sequence and s.sequence < k.first_sequence + k.count
        ) as never,
        exists (from accepted a where (a.log_id, a.hour, a.sequence) = (s.log_id, s.hour, s.sequence)) as is_accepted
    from scheduled s
    join server v using (log_id)
    where s.filed
)
select *, copy = 1 and not never and not is_accepted and first_sequence > 0 and sequence >= first_sequence as elsewhere
from judged_rows;

-- CANCELLED rows, and what the message log decided of them: where it keeps the message, it keeps the decision.
create view cancelled as
select
    j.log_id, j.hour, j.sequence, j.reason, d.reason as decided, v.first_sequence,
    j.other_sequence, j.other_due_ms,
    coalesce(d.other_sequence, 0) as decided_sequence, coalesce(d.other_deliver_at_ms, 0) as decided_due_ms
from judged j
join server v using (log_id)
left join decision d using (log_id, hour, sequence)
where j.outcome = 'CANCELLED' and j.reason <> '';

create view filed_as as
select
    s.log_id, s.hour, s.sequence,
    s.appended_at_ms as s_at_ms, a.appended_at_ms as a_at_ms,
    coalesce(s.expires_at_ms, 0) as s_expires_ms, coalesce(a.expires_at_ms, 0) as a_expires_ms,
    coalesce(s.labels_hash, 0) as s_labels, coalesce(a.labels_hash, 0) as a_labels,
    s.deliver_at_ms as s_due_ms, s.subject as s_subject, s.body_bytes as s_body_bytes, coalesce(s.content_hash, 0) as s_content,
    a.deliver_at_ms as a_due_ms, a.subject as a_subject, a.body_bytes as a_body_bytes, coalesce(a.content_hash, 0) as a_content
from scheduled s
join accepted a using (log_id, hour, sequence)
where s.filed and s.copy = 1;

create temp table findings as
with once as (from judged where outcomes = 1 and places = 1)
select log_id, hour, sequence, 'LOST' as finding, 'without an outcome' as detail from judged where overdue
union all
select log_id, hour, sequence, 'LOST', 'not where the dispatch log says' from judged where not_there
union all
select log_id, hour, sequence, 'DUPLICATE', 'outcomes' from judged where outcomes > 1
union all
select log_id, hour, sequence, 'DUPLICATE', 'places' from judged where places > 1
union all
select log_id, hour, sequence, 'DUPLICATE', 'scheduled again' from judged where copy > 1
union all
select log_id, hour, sequence, 'EARLY', 'claimed' from judged where first_claim_ms < deliver_at_ms
union all
select origin, hour, sequence, 'ORPHAN', 'at a target, not scheduled' from message m
where not newer and not exists (
    from schedule s where (s.log_id, s.hour, s.sequence) = (m.origin, m.hour, m.sequence)
)
union all
select log_id, hour, sequence, 'ORPHAN', 'an outcome, not scheduled' from dispatch d
where not exists (from schedule s where (s.log_id, s.hour, s.sequence) = (d.log_id, d.hour, d.sequence))
union all
select log_id, hour, sequence, 'ORPHAN', 'decided, without an outcome' from judged
where places > 0 and outcomes = 0 and decided
union all
select log_id, hour, sequence, 'MISMATCH', 'outcome' from once where outcome not in ('DISPATCHED', 'IN_DOUBT')
union all
select log_id, hour, sequence, 'MISMATCH', 'target' from once where said_dispatched and said_target <> target
union all
select log_id, hour, sequence, 'MISMATCH', 'offset' from once
where said_dispatched and said_target = target and said_offset <> target_offset
union all
select log_id, hour, sequence, 'MISMATCH', 'claim' from once
where said_dispatched and said_target = target and said_claim_ms <> claimed_at_ms
union all
select log_id, hour, sequence, 'MISMATCH', 'append' from once
where said_dispatched and said_target = target and said_append_ms <> stored_ms
union all
select log_id, hour, sequence, 'MISMATCH', 'due, by the dispatch log' from judged where said_due_ms <> deliver_at_ms
union all
select log_id, hour, sequence, 'MISMATCH', 'due, by the target' from judged where stored_due_ms <> deliver_at_ms
union all
select log_id, hour, sequence, 'MISMATCH', 'batch' from once
where said_dispatched and said_target = target and (said_epoch, said_batch) <> (stored_epoch, stored_batch)
union all
select log_id, hour, sequence, 'MISMATCH', 'attempt' from judged where said_dispatched and said_attempt <> 1
union all
select log_id, hour, sequence, 'MISMATCH', 'nobody decides' from judged
where (outcome = 'EXPIRED' and (expires_at_ms is null or said_claim_ms < expires_at_ms))
   or (outcome = 'CANCELLED' and reason = '')
union all
select log_id, hour, sequence, 'MISMATCH', 'nobody decided it' from cancelled
where decided is null and first_sequence > 0 and sequence >= first_sequence
union all
select log_id, hour, sequence, 'MISMATCH', 'decided for another reason' from cancelled where decided <> reason
union all
-- That of a drained row is at another delay server, and only the outcome says which it is.
select log_id, hour, sequence, 'MISMATCH', 'another row took its place' from cancelled
where decided = reason and reason not in ('CANCELLED', 'DRAINED')
    and (other_sequence, other_due_ms) <> (decided_sequence, decided_due_ms)
union all
select log_id, hour, sequence, 'MISMATCH', 'subject' from judged where places > 0 and stored_subject <> subject
union all
-- Content hashes; an outcome of what was not handed over need not state one.
select log_id, hour, sequence, 'MISMATCH', 'content, by the dispatch log' from judged
where outcomes > 0 and said_content <> coalesce(content_hash, 0) and (said_dispatched or said_content <> 0)
union all
select log_id, hour, sequence, 'MISMATCH', 'content, by the target' from judged
where places > 0 and stored_content <> coalesce(content_hash, 0)
union all
select log_id, hour, sequence, 'MISMATCH', 'content left out' from judged
where left_out and without_word and copy = 1
union all
select log_id, hour, sequence, 'LATE', 'late' from judged, terms where late_ms > terms.late_ms_limit
union all
select log_id, hour, 0, 'CONSERVATION', detail from fault
union all
select h.log_id, h.hour, 0, 'CONSERVATION', 'the hour has other rows than the checkpoint counts' from hour h
where counted <> (from schedule s select count(*) where (s.log_id, s.hour) = (h.log_id, h.hour) and s.filed)
union all
-- What was accepted is filed, as far as the message log is kept.
select a.log_id, a.hour, a.sequence, 'LOST', 'not filed' from unfiled a
left join hour h using (log_id, hour) where a.missing > coalesce(h.dropped, 0)
union all
select s.log_id, s.hour, s.sequence, 'ORPHAN', 'never given' from ungiven s where s.never
union all
select s.log_id, s.hour, s.sequence, 'MISMATCH', 'filed elsewhere' from ungiven s where s.elsewhere
union all
select s.log_id, s.hour, s.sequence, 'MISMATCH', 'of another hour' from schedule s
where filed and hour <> strftime(make_timestamp(greatest(deliver_at_ms, coalesce(appended_at_ms, 0)) * 1000), '%Y%m%d%H')
union all
select log_id, hour, sequence, 'MISMATCH', 'due, as accepted' from filed_as where s_due_ms <> a_due_ms
union all
-- Where nothing says when it was accepted, it was not past due then.
select log_id, hour, sequence, 'MISMATCH', 'when accepted' from filed_as
where (s_at_ms is not null or a_at_ms > a_due_ms) and coalesce(s_at_ms, 0) <> a_at_ms
union all
select log_id, hour, sequence, 'MISMATCH', 'subject, as accepted' from filed_as where s_subject <> a_subject
union all
select log_id, hour, sequence, 'MISMATCH', 'body, as accepted' from filed_as where s_body_bytes <> a_body_bytes
union all
select log_id, hour, sequence, 'MISMATCH', 'content, as accepted' from filed_as where s_content <> a_content
union all
select log_id, hour, sequence, 'MISMATCH', 'expiry, as accepted' from filed_as where s_expires_ms <> a_expires_ms
union all
select log_id, hour, sequence, 'MISMATCH', 'labels, as accepted' from filed_as where s_labels <> a_labels;

-- By delay server, hour and subject: what became of the messages.
create temp table subjects as
select
    log_id, hour, subject,
    count(*) as scheduled,
    count_if(proved) as dispatched,
    count_if(outcome = 'DEAD') as dead,
    count_if(outcome = 'CANCELLED') as cancelled,
    count_if(outcome = 'EXPIRED') as expired,
    count_if(outcome = 'IN_DOUBT') as in_doubt,
    count_if(pending) as pending,
    count_if(outcomes = 0 and not pending and not waiting and not overdue) as undecided,
    count_if(waiting) as waiting,
    count_if(not_there or overdue) as missing,
    count_if(unproven) as unproven,
    count_if(moved) as moved,
    count_if(redriven) as redriven,
    count_if(past_due) as past_due
from judged
group by all;

create temp table hours as
with figures as (
    select log_id, hour, sum(columns(subjects.* exclude (log_id, hour, subject))) from subjects group by log_id, hour
),
times as (
    select log_id, hour, list_sort(list(greatest(lateness_ms, 0))) as lateness
    from judged
    where proved and not past_due
    group by all
),
-- A message counts once for each kind of finding.
faults as (
    select
        log_id, hour,
        count(distinct sequence) filter (where finding = 'LOST') as lost,
        count(distinct sequence) filter (where finding = 'DUPLICATE') as duplicate,
        count(distinct sequence) filter (where finding = 'EARLY') as early,
        count(distinct sequence) filter (where finding = 'ORPHAN') as orphan,
        count(distinct sequence) filter (where finding = 'MISMATCH') as mismatch,
        count(distinct sequence) filter (where finding = 'CONSERVATION') as conservation,
        count(distinct sequence) filter (where finding = 'LATE') as late
    from findings
    -- What the totals of a delay server contradict is in no hour's figures.
    where (log_id, hour, detail) not in (select (log_id, hour, detail) from fault)
    group by all
)
select
    log_id, hour,
    coalesce(columns(figures.* exclude (log_id, hour)), 0),
    coalesce(columns(faults.* exclude (log_id, hour)), 0),
    lateness[greatest(1, ceil(0.5 * len(lateness))::bigint)] as late_p50_ms,
    lateness[greatest(1, ceil(0.99 * len(lateness))::bigint)] as late_p99_ms,
    lateness[greatest(1, ceil(0.999 * len(lateness))::bigint)] as late_p999_ms,
    coalesce(lateness[-1], 0) as late_ms_max
from figures full join faults using (log_id, hour) left join times using (log_id, hour);

create view totals as
select
    sum(scheduled) as scheduled, sum(dispatched) as dispatched, sum(dead) as dead, sum(cancelled) as cancelled,
    sum(expired) as expired, sum(in_doubt) as in_doubt, sum(pending) as pending, sum(undecided) as undecided,
    sum(waiting) as waiting, sum(missing) as missing, sum(unproven) as unproven, sum(moved) as moved,
    sum(redriven) as redriven, sum(past_due) as past_due,
    sum(lost) as lost, sum(duplicate) as duplicate, sum(early) as early, sum(orphan) as orphan,
    sum(mismatch) as mismatch, sum(conservation) as conservation, sum(late) as late, max(late_ms_max) as late_ms_max
from hours;

-- By group of consumers: what it was given, and whether that is what became of it.
create view consumption as
select *, pulled = acknowledged + given_back + sent_back + lapsed + outstanding as adds_up from 'consumption.parquet';
