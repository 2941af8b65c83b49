"""Quality control of a project: how far raters agree, what is odd about single ones, what a person should look at.

Pure functions on :class:`~heedful.annotate.submitted.Submitted`; scipy, statsmodels and evalica are imported when
first needed, since they take a second.

    pairs       rankings become verdicts on pairs of answers, with what the screen showed
    agreement   all raters together: pair agreement, Kendall's τ-b and W, Krippendorff's α
    bias        a logistic regression of one rater's verdicts, clustered by prompt
    raters      the same questions to every single rater, each answered with an interval
    flags       which answers leave the tolerated range: for review
    report      all of it as JSON and as text
"""
