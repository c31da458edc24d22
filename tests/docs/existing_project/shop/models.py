"""What the shop sells on."""

from django.db import models


class Order(models.Model):
    """An order, and whether its invoice was sent."""

    customer = models.CharField(max_length=100)
    invoiced = models.BooleanField(default=False)

    class Meta:
        app_label = "shop"

    def __str__(self):
        return self.customer

    def send_invoice(self):
        """Pretend to."""
        self.invoiced = True
        self.save()
