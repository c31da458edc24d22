"""The steps of ``manage.py demo``, in order: setup, loading, filing, pollers, figures; ``screen`` shows them."""
