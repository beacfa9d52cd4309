"""The audit as one page of HTML, to be shown to people: no script, and nothing is fetched (docs/audit-report.md).

A map, from the report to the page.

    page        what the page says, from an `AuditReport` alone; its words
    charts      how it draws: hours by outcome, how late messages were, and when
    page.html   how it looks, in light, dark, on a phone and on paper

Words. A *period* is what a chart has a column for: an hour, or more when there are too many hours.
"""
