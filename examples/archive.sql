-- The tables of an export, made of an archive by the rules of docs/archive.md and without a line of delayd's code: so
-- examples/audit.sql audits the archive alone. And the table `seals`, each compared with the rows of its hour:
--
--     mkdir -p books/{accepted,decision,schedule,dispatch,message,hour} && cd books
--     (echo "set variable archive = '/srv/archive';"; cat PATH/examples/archive.sql PATH/examples/audit.sql
--      echo "from totals; from seals; from findings order by all limit 100;") | duckdb
--
-- What is wrong with a file or a note is a row of the table `fault`, and so a finding CONSERVATION.

-- Numbers as they are packed: little-endian, in hexadecimal digits.
create macro le8(n) as array_to_string(
    list_transform([15, 13, 11, 9, 7, 5, 3, 1], lambda i: substr(lpad(to_hex(n), 16, '0'), i, 2)), ''
);
create macro le4(n) as left(le8(n::bigint), 8);
create macro le2(n) as left(le8(n::bigint), 4);
create macro le1(n) as left(le8(n::bigint), 2);

-- docs/formats/content.md: two rounds of a product modulo 2^64, and the state of a tally after three numbers.
create macro rounded(n) as
    ((xor(n, n >> 32)::uhugeint * 15485907386658061715::uhugeint) % 18446744073709551616::uhugeint)::ubigint;
create macro folded(n) as xor(n, n >> 32);
create macro mixed(n) as folded(rounded(rounded(n)));
create macro after(state, n) as mixed(((state::uhugeint + n::uhugeint) % 18446744073709551616::uhugeint)::ubigint);
create macro unsigned(n) as (if(n < 0, n::hugeint + 18446744073709551616::hugeint, n::hugeint))::ubigint;

create temp table noted as
with texts as (
    select regexp_extract(filename, 'notes/(.*)\.json$', 1) as path, content::json as said
    from read_text(getvariable('archive') || '/notes/**/*.json')
    where filename not like '%/notes/consumption/%'
),
fields as (
    select
        path,
        regexp_extract(path, 'hour=([0-9]{10})/', 1) as hour,
        regexp_extract(path, 'server=([0-9a-f]{16})/', 1) as log_id,
        regexp_extract(path, '([0-9a-f]{16})$', 1) as origin,
        said->>'table' as kind,
        said->>'hour' as said_hour, said->>'log_id' as said_log_id, said->>'origin' as said_origin,
        (said->>'rows')::bigint as rows, (said->>'bytes')::bigint as bytes, said->>'sha256' as digest,
        (said->>'start_offset')::bigint as start_offset,
        said->'seal' as seal
    from texts
),
seals as (
    select
        fields.*,
        seal->>'log_id' as seal_log_id, seal->>'hour' as seal_hour, (seal->>'number')::bigint as number,
        seal->>'sha256' as seal_digest, seal->>'previous_sha256' as before,
        sha256(unhex(
            le8(('0x' || (seal->>'log_id'))::ubigint)
            || le4(epoch(strptime(seal->>'hour', '%Y%m%d%H'))::bigint // 3600) || le4(seal->>'number')
            || array_to_string(list_transform(
                ['rows', 'body_bytes', 'dispatched', 'cancelled', 'dead', 'expired', 'in_doubt', 'due_min_ms',
                 'due_max_ms', 'tally_first', 'tally_second'],
                lambda name: le8((seal->>name)::ubigint)
            ), '')
            || (seal->>'schedule_sha256') || (seal->>'outcomes_sha256') || (seal->>'previous_sha256')
        )) as packed_digest
    from fields
)
select
    *,
    path = concat_ws(
        '/', kind, 'day=' || strftime(strptime(said_hour, '%Y%m%d%H'), '%Y-%m-%d'), 'hour=' || said_hour,
        'server=' || said_log_id, said_origin
    )
    and if(
        kind = 'schedule', seal_log_id = log_id and seal_hour = hour and seal_digest = packed_digest, seal is null
    ) as sound
from seals;

create temp table file as
select regexp_extract(filename, '((schedule|message)/.*)\.parquet$', 1) as path, filename, size,
    sha256(content) as digest
from read_blob(getvariable('archive') || '/**/*.parquet')
where filename not like '%/.%' and filename not like '%/consumption/day=%';

-- Each note of a file, and the file where it has the bytes that the note names.
create temp table archived as
select n.*, f.filename, n.digest <> '' and f.filename is null as differs
from noted n left join file f on f.path = n.path and f.size = n.bytes and f.digest = n.digest
where n.sound;
set variable files = (select list(filename) from archived where filename is not null);

-- A file says what it is, how many rows it has, and of a realtime log where that began.
create temp table facts as
select
    file_name as filename,
    map_from_entries(list((decode(key), decode(value)))) as said
from parquet_kv_metadata(getvariable('files')) group by all;
create temp table readable as
select
    a.*,
    m.num_rows = a.rows and coalesce(f.said['delayd.start_offset'], '0') = a.start_offset::varchar as is_counted,
    f.said['delayd.version'] in ('1', '2') and f.said['delayd.table'] = a.kind and f.said['delayd.hour'] = a.hour
        and f.said['delayd.log_id'] = a.log_id and f.said['delayd.origin'] = a.origin as is_itself
from archived a
left join parquet_file_metadata(getvariable('files')) m on m.file_name = a.filename
left join facts f using (filename);
set variable schedules = (select list(filename) from readable where kind = 'schedule' and is_counted);
set variable messages = (select list(filename) from readable where kind = 'message' and is_counted);

create temp table archived_schedule as
select
    r.path, r.log_id, r.hour, file_row_number, sequence, subject, deliver_at_ms, appended_at_ms, expires_at_ms,
    body_bytes, content_hash, labels_hash, left_out, outcome, reason, other_sequence, target, claimed_at_ms,
    target_appended_at_ms, target_offset, epoch, batch_id, attempt, outcome_content_hash
from read_parquet(
    getvariable('schedules'), filename = true, file_row_number = true, hive_partitioning = false, union_by_name = true
)
join readable r using (filename);
create temp table archived_message as
select r.path, r.log_id, r.origin, r.hour, m.* exclude (filename)
from read_parquet(getvariable('messages'), filename = true, file_row_number = true, hive_partitioning = false) m
join readable r using (filename);

-- An hour is not judged when a file of it says that it is another one, or has rows that do not rise.
create temp table rising as
select path, bool_and(coalesce(sequence > before, true)) as rises
from (
    select path, sequence, lag(sequence) over (partition by path order by file_row_number) as before
    from archived_schedule
)
group by path
union all
select path, bool_and(coalesce(sequence >= before, true))
from (
    select path, sequence, lag(sequence) over (partition by path order by file_row_number) as before
    from archived_message
)
group by path;
create temp table unjudged as
select distinct origin as log_id, hour
from readable left join rising using (path)
where filename is not null and is_counted and not (is_itself and coalesce(rises, true));
create temp table judged_hour as
select r.log_id, r.hour from readable r anti join unjudged using (log_id, hour)
where r.kind = 'schedule' and r.filename is not null and r.is_counted;
create temp table removed_hour as
select a.* from archived a anti join unjudged using (log_id, hour) where a.kind = 'schedule' and a.digest = '';

-- The digests and figures of the hours, as their seals should have them.
create temp table digested as
with numbered as (
    select
        s.*,
        coalesce(content_hash, 0) as content,
        coalesce(outcome_content_hash, content_hash, 0) as stated,
        dense_rank() over (partition by log_id, hour order by first_of) - 1 as subject_number
    from (select *, min(sequence) over (partition by log_id, hour, subject) as first_of from archived_schedule) s
    semi join judged_hour using (log_id, hour)
),
rows as (
    select
        *,
        le8(sequence) || le8(deliver_at_ms) || le4(subject_number) || le4(body_bytes) || le8(content) as filed,
        le8(sequence) || le8(deliver_at_ms) || le8(coalesce(claimed_at_ms, 0))
            || le8(('0x' || coalesce(target, '0'))::ubigint) || le8(coalesce(epoch, 0)) || le8(coalesce(batch_id, 0))
            || le8(coalesce(target_appended_at_ms, 0)) || le8(coalesce(target_offset, 0))
            || le1(list_position(['DISPATCHED', 'CANCELLED', 'DEAD', 'EXPIRED', 'IN_DOUBT'], outcome))
            || le1(coalesce(list_position(
                ['CANCELLED', '', 'MOVED', 'REPLACED', 'REJECTED', 'KEPT', 'IN_FLIGHT', 'DRAINED'], reason), 0))
            || le2(coalesce(attempt, 0)) || le4(0) || le8(stated) as ended
    from numbered
),
names as (
    select log_id, hour, string_agg(le4(strlen(subject)) || hex(subject), '' order by subject_number) as subjects
    from (select distinct log_id, hour, subject, subject_number from numbered)
    group by all
),
tallied as (
    select
        log_id, hour,
        sum(after(after(after(mixed(1::ubigint), sequence), deliver_at_ms), unsigned(stated))) as first_sum,
        sum(after(after(after(mixed(2::ubigint), sequence), deliver_at_ms), unsigned(stated))) as second_sum
    from numbered where outcome = 'DISPATCHED' group by all
)
select
    log_id, hour,
    count(*) as rows, sum(body_bytes) as body_bytes,
    count_if(outcome = 'DISPATCHED') as dispatched, count_if(outcome = 'CANCELLED') as cancelled,
    count_if(outcome = 'DEAD') as dead, count_if(outcome = 'EXPIRED') as expired,
    count_if(outcome = 'IN_DOUBT') as in_doubt,
    min(deliver_at_ms) as due_min_ms, max(deliver_at_ms) as due_max_ms,
    coalesce(any_value(first_sum), 0) % 18446744073709551616::hugeint as tally_first,
    coalesce(any_value(second_sum), 0) % 18446744073709551616::hugeint as tally_second,
    sha256(unhex(string_agg(filed, '' order by sequence) || any_value(subjects))) as schedule_sha256,
    sha256(unhex(string_agg(ended, '' order by sequence))) as outcomes_sha256
from rows join names using (log_id, hour) left join tallied using (log_id, hour)
group by all;

create temp table seals as
with chained as (
    select
        log_id, hour, number, seal, digest,
        lag(number) over chain as number_before,
        lag(seal_digest) over chain as digest_before,
        before
    from archived where kind = 'schedule'
    window chain as (partition by log_id order by number, hour)
),
compared as (
    select
        c.*,
        array_to_string(list_filter([
            if(number = number_before, 'another hour has its number, too', null),
            if(number = coalesce(number_before, -1) + 1 and before <> coalesce(digest_before, repeat('0', 64)),
               'the seal before it is not the one that it follows', null),
            if((seal->>'rows')::bigint <> d.rows, 'rows', null),
            if((seal->>'body_bytes')::bigint <> d.body_bytes, 'body_bytes', null),
            if((seal->>'dispatched')::bigint <> d.dispatched, 'dispatched', null),
            if((seal->>'cancelled')::bigint <> d.cancelled, 'cancelled', null),
            if((seal->>'dead')::bigint <> d.dead, 'dead', null),
            if((seal->>'expired')::bigint <> d.expired, 'expired', null),
            if((seal->>'in_doubt')::bigint <> d.in_doubt, 'in_doubt', null),
            if((seal->>'due_min_ms')::bigint <> d.due_min_ms, 'due_min_ms', null),
            if((seal->>'due_max_ms')::bigint <> d.due_max_ms, 'due_max_ms', null),
            if((seal->>'tally_first')::hugeint <> d.tally_first, 'tally_first', null),
            if((seal->>'tally_second')::hugeint <> d.tally_second, 'tally_second', null),
            if(seal->>'schedule_sha256' <> d.schedule_sha256, 'schedule_sha256', null),
            if(seal->>'outcomes_sha256' <> d.outcomes_sha256, 'outcomes_sha256', null)
        ], lambda what: what is not null), ', ') as differs,
        d.rows is not null as is_compared
    from chained c left join digested d using (log_id, hour)
)
select
    log_id, hour, number, number_before, differs,
    case when differs <> '' then 'BROKEN' when digest = '' then 'deleted' when is_compared then 'verified'
        else 'unread' end as state
from compared;

-- Of an hour that retention removed, what targets held must be what its seal says was handed over, or less.
create temp table held as
select
    r.log_id, r.hour, r.seal,
    count(m.sequence) as rows,
    coalesce(sum(after(after(after(mixed(1::ubigint), m.sequence), m.deliver_at_ms),
        unsigned(coalesce(m.content_hash, 0)))), 0) % 18446744073709551616::hugeint as tally_first,
    coalesce(sum(after(after(after(mixed(2::ubigint), m.sequence), m.deliver_at_ms),
        unsigned(coalesce(m.content_hash, 0)))), 0) % 18446744073709551616::hugeint as tally_second
from removed_hour r left join archived_message m on (m.origin, m.hour) = (r.log_id, r.hour)
group by all;

copy (
    select log_id, hour, path || ': it is no note of this file' as detail from noted where not sound
    union all
    select log_id, hour, path || ': the file is gone, or another one than its note names' from archived where differs
    union all
    select log_id, hour, path || ': its note counts other rows, or says otherwise where the realtime log began'
    from readable where filename is not null and not is_counted
    union all
    select log_id, hour, 'a file is of another hour or server, or its rows do not rise' from unjudged
    union all
    select m.log_id, m.hour, m.path || ': the archive has no schedule of this hour'
    from archived m anti join (from archived where kind = 'schedule') s on (s.log_id, s.hour) = (m.origin, m.hour)
    where m.kind = 'message'
    union all
    select log_id, '1970010100', 'the hour of seal ' || missing || ' is missing, and later ones are there'
    from (
        select log_id, unnest(range(coalesce(number_before, -1) + 1, number)) as missing
        from seals where number > coalesce(number_before, -1) + 1
    )
    union all
    select log_id, hour, 'its realtime servers held other messages than its seal says' from held
    where rows > (seal->>'dispatched')::bigint + (seal->>'in_doubt')::bigint
        or not (rows < (seal->>'dispatched')::bigint or (seal->>'in_doubt')::bigint > 0
            or ((seal->>'tally_first')::hugeint, (seal->>'tally_second')::hugeint) = (tally_first, tally_second)
                and rows = (seal->>'dispatched')::bigint)
) to 'fault.parquet';

copy (
    select
        log_id, hour, sequence, subject, deliver_at_ms, appended_at_ms, expires_at_ms, body_bytes, content_hash,
        labels_hash, left_out, false as filed
    from archived_schedule semi join judged_hour using (log_id, hour)
    order by log_id, hour, file_row_number
) to 'schedule/archive.parquet';
copy (
    select
        log_id, origin, hour, row_number() over (order by log_id, path, file_row_number) as place, sequence, subject,
        deliver_at_ms, claimed_at_ms, appended_at_ms, "offset", epoch, batch_id, true as decided, false as newer,
        content_hash
    from archived_message m semi join judged_hour j on (j.log_id, j.hour) = (m.origin, m.hour)
) to 'message/archive.parquet';
-- A target proves nothing of an hour of which no file of it is here, nor of what its log had removed before.
copy (
    select
        s.log_id, s.hour, s.file_row_number as place, s.sequence, s.subject, s.deliver_at_ms, s.outcome, s.reason,
        s.other_sequence,
        case when outcome = 'CANCELLED' and reason <> 'DRAINED' then target_appended_at_ms end as other_deliver_at_ms,
        case when held.server is not null or t.path is not null and coalesce(s.target_offset, 0) >= t.start_offset
            then s.target end as target,
        s.claimed_at_ms, s.target_appended_at_ms, s.target_offset, s.epoch, s.batch_id, s.attempt,
        coalesce(s.outcome_content_hash, s.content_hash) as content_hash
    from (from archived_schedule semi join judged_hour using (log_id, hour)) s
    left join (from readable where kind = 'message' and (digest = '' or is_counted)) t
        on (t.log_id, t.origin, t.hour) = (s.target, s.log_id, s.hour)
    left join (select distinct origin, hour, sequence, log_id as server from archived_message) held
        on (held.origin, held.hour, held.sequence, held.server) = (s.log_id, s.hour, s.sequence, s.target)
) to 'dispatch/archive.parquet';
copy (select distinct log_id, 0 as start_offset from archived where kind = 'message') to 'target.parquet';
copy (
    select distinct log_id, null::varchar as subject, 0 as since_ms, 0 as until_ms from judged_hour
) to 'span.parquet';
copy (select epoch_ms(now()) as now_ms, 10_000 as grace_ms, 1_000 as late_ms_limit) to 'terms.parquet';
-- No message log, checkpoint or pull log is archived.
copy (
    select distinct log_id, 0 as first_sequence, 9223372036854775807 as next_sequence from judged_hour
) to 'server.parquet';
copy (
    select log_id, hour, sequence, subject, deliver_at_ms, appended_at_ms, expires_at_ms, body_bytes, content_hash,
        labels_hash
    from 'schedule/archive.parquet' limit 0
) to 'accepted/archive.parquet';
copy (
    select
        log_id, hour, sequence, '' as reason, 0 as other_sequence, 0 as other_deliver_at_ms, 0 as decided_at_ms
    from 'schedule/archive.parquet' limit 0
) to 'decision/archive.parquet';
copy (select log_id, 0 as first_sequence, 0 as count from 'schedule/archive.parquet' limit 0) to 'skipped.parquet';
copy (
    select log_id, hour, 0 as counted, 0 as dropped from 'schedule/archive.parquet' limit 0
) to 'hour/archive.parquet';
copy (
    select
        log_id, subject, '' as consumers, '' as group_id, 0 as pulled, 0 as redelivered, 0 as acknowledged,
        0 as given_back, 0 as sent_back, 0 as lapsed, 0 as outstanding, 0 as gaps, 0 as ack_ms_total, 0 as ack_ms_max
    from 'schedule/archive.parquet' limit 0
) to 'consumption.parquet';
