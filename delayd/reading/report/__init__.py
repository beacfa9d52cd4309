"""The audit as one page of HTML, to be shown to people: no script, and nothing is fetched (docs/audit-report.md).

A map, from the report to the page and its picture.

    page        what the page says, from an `AuditReport` alone; its words
    picture     the first part of it and the charts as a PNG, by matplotlib
    summary     what both say first: the verdict, the totals, the scope
    charts      what both draw: hours by outcome, how late messages were, and when
    page.html   how it looks, in light, dark, on a phone and on paper; page.css has the colours of both

Words. A *period* is what a chart has a column for: an hour, or more when there are too many hours.
"""
